"""One frozen settings class per process, read once at its start.

An option is taken from the command line, else from the environment, else from the YAML file that --config or
KVASIR_CONFIG names, else it has its default. Unknown names are errors everywhere, in the environment too: with a typo,
the default would silently stay in place.
"""

import json
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self

import yaml
from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from kvasir.common.config_errors import did_you_mean, explain_all, explain_parsing

_NO_DEFAULT = re.compile(r" ?\(default: (null|\[\]|\{\}|)\)$|^default: null \(undefined\)\n")
_METAVARS = {
    "str": "TEXT",
    "int": "N",
    "float": "X",
    "Path": "PATH",
    "list[str]": "TEXT,..",
    "dict[str,str]": "NAME=VALUE",
    "dict[str,{str,int,float,bool}]": "NAME=VALUE",
}


def _as_list(value: Any) -> Any:
    """'a,b' or '["a", "b"]' -> ['a', 'b'], since environment variables may hold either."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip().startswith("[") else [word.strip() for word in value.split(",") if word]


def _as_keys(value: Any) -> Any:
    """As `_as_list`, but refuse an empty text: it is probably a variable that was not set, and must not mean "no keys",
    which would let anybody in."""
    keys = _as_list(value)
    if keys == [] and isinstance(value, str) and not value.lstrip().startswith("["):
        raise ValueError("an empty text is no key; where anybody may ask, leave the option out")
    return keys


Words = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode, BeforeValidator(_as_list)]
Keys = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode, BeforeValidator(_as_keys)]


class ServiceConfig(BaseSettings):
    """Subclasses set `env_prefix` and declare fields; `load` is the only way in for a process."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False,
        cli_kebab_case=True, cli_implicit_flags=True, cli_exit_on_error=False, env_nested_delimiter="__",
    )  # fmt: skip

    # Environment variables that may begin with our prefix but are not fields of this class.
    also_allowed: ClassVar[frozenset[str]] = frozenset({"KVASIR_CONFIG", "KVASIR_CLUSTER_SECRET"})
    _config_file: ClassVar[str | None] = None

    @classmethod
    def load(cls, argv: list[str], prog: str | None = None) -> Self:
        """Parse, or explain on stderr what is wrong and exit with status 2."""
        argv, cls._config_file = _take_config_option(argv)
        unknown = cls.unknown_environment(os.environ)
        if unknown:
            _refuse(f"unknown environment variable {unknown[0]}{did_you_mean(unknown[0], cls.variables())}")
        try:
            if prog is not None:
                cls.model_config["cli_prog_name"] = prog
            return CliApp.run(cls, cli_args=argv, cli_settings_source=_with_config_option(cls))
        except ValidationError as error:
            _refuse("\nerror: ".join(explain_all(error, cls)))
        except SettingsError as error:
            _refuse(explain_parsing(str(error), cls))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        path = cls._config_file or os.environ.get("KVASIR_CONFIG")
        if path is None:
            return init_settings, env_settings
        return init_settings, env_settings, InitSettingsSource(settings_cls, _read_yaml(path))

    @classmethod
    def variables(cls) -> list[str]:
        prefix = str(cls.model_config.get("env_prefix", ""))
        return [f"{prefix}{name}".upper() for name in cls.model_fields]

    @classmethod
    def unknown_environment(cls, environ: Any) -> list[str]:
        """Variables with this service's prefix that are none of its fields."""
        prefix = str(cls.model_config.get("env_prefix", "")).upper()
        known = {*cls.variables(), *cls.also_allowed}
        return sorted(
            name for name in environ if name.upper().startswith(prefix) and name.upper().split("__")[0] not in known
        )


def _with_config_option(cls: type[ServiceConfig]) -> CliSettingsSource[Any]:
    """The parser of the command line, with --config in its --help."""
    source: CliSettingsSource[Any] = CliSettingsSource(cls)
    prefix = str(cls.model_config.get("env_prefix", ""))
    source.root_parser.add_argument("--config", metavar="FILE", help="YAML file with any of these options.")
    source.root_parser.epilog = (
        f"Each option can also stand in the environment (--log-level as {prefix}LOG_LEVEL), "
        "or in the file that --config or KVASIR_CONFIG names (log_level: debug)."
    )
    for group in source.root_parser._action_groups:
        group.description = group.description and _NO_DEFAULT.sub("", group.description)
    for action in source.root_parser._actions:
        action.help = action.help and _NO_DEFAULT.sub("", action.help).replace("(ifdef: required)", "(required)")
        if isinstance(action.metavar, str):
            action.metavar = _METAVARS.get(action.metavar) or _in_users_words(action.metavar)
    return source


def _in_users_words(types: str) -> str:
    """'{int,null}' -> 'N', '{a,b}' as it is"""
    words = [_METAVARS.get(word, word) for word in re.sub("[{}]", "", types).split(",") if word != "null"]
    return words[0] if len(words) == 1 else f"{{{','.join(words)}}}"


def _take_config_option(argv: list[str]) -> tuple[list[str], str | None]:
    """`--config F` or `--config=F` anywhere in `argv` -> the rest, F"""
    rest: list[str] = []
    path: str | None = None
    words = iter(argv)
    for word in words:
        if word == "--config":
            path = next(words, None)
            if path is None:
                _refuse("--config wants the name of a YAML file")
        elif word.startswith("--config="):
            path = word.removeprefix("--config=")
        else:
            rest.append(word)
    return rest, path


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        options = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"config file {path} cannot be read: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise SettingsError(f"config file {path}, line {line}: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise SettingsError(f"config file {path} is no YAML: {str(error).splitlines()[0]}") from error
    if not isinstance(options or {}, dict):
        raise SettingsError(f"config file {path} must hold options, one a line, as `name: value`")
    return {str(name): value for name, value in (options or {}).items()}


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
