"""One frozen settings class per process, read once at the door.

Command line > environment > the YAML file named by --config or KVASIR_CONFIG > default. Unknown names are errors
everywhere, in the environment too: a typo must not be a silent default.
"""

import difflib
import json
import os
import sys
from typing import Annotated, Any, ClassVar, NoReturn, Self

from pydantic import BeforeValidator, Field, ValidationError
from pydantic_settings import (
    BaseSettings,
    CliApp,
    CliSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
    YamlConfigSettingsSource,
)


def _as_list(value: Any) -> Any:
    """'a,b' and '["a", "b"]' -> ['a', 'b']: in an environment variable either will do."""
    if not isinstance(value, str):
        return value
    return json.loads(value) if value.lstrip().startswith("[") else [word.strip() for word in value.split(",") if word]


Words = Annotated[list[Annotated[str, Field(min_length=1)]], NoDecode, BeforeValidator(_as_list)]


class ServiceConfig(BaseSettings):
    """Subclasses set `env_prefix` and declare fields; `load` is the only way in for a process."""

    model_config = SettingsConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False,
        cli_kebab_case=True, cli_implicit_flags=True, env_nested_delimiter="__",
    )  # fmt: skip

    # The environment variables that share our prefix but are not fields of this class.
    also_allowed: ClassVar[frozenset[str]] = frozenset({"KVASIR_CONFIG", "KVASIR_CLUSTER_SECRET"})
    _config_file: ClassVar[str | None] = None

    @classmethod
    def load(cls, argv: list[str], prog: str | None = None) -> Self:
        """Parse, or explain on stderr what is wrong and exit with status 2."""
        argv, cls._config_file = _take_config_option(argv)
        unknown = cls.unknown_environment(os.environ)
        if unknown:
            _refuse(f"unknown environment variable {unknown[0]}{_did_you_mean(unknown[0], cls.variables())}")
        try:
            if prog is not None:
                cls.model_config["cli_prog_name"] = prog
            return CliApp.run(cls, cli_args=argv, cli_settings_source=_with_config_option(cls))
        except ValidationError as error:
            _refuse("\n".join(_explain(problem, cls) for problem in error.errors()))
        except (SettingsError, FileNotFoundError) as error:
            _refuse(str(error))

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
        if not os.path.isfile(path):
            raise FileNotFoundError(f"config file {path} does not exist")
        return init_settings, env_settings, YamlConfigSettingsSource(settings_cls, path)

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
    """The parser of the command line, whose --help knows --config too."""
    source: CliSettingsSource[Any] = CliSettingsSource(cls)
    variable = "KVASIR_CONFIG"
    source.root_parser.add_argument(
        "--config", metavar="FILE", help=f"YAML file with any of these options, by their names; or {variable}."
    )
    return source


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


def _explain(problem: Any, cls: type[ServiceConfig]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing" and len(problem["loc"]) > 1:
        return f"{name} is wanted"
    if problem["type"] == "model_type":
        return f"{name}: a JSON object is wanted, got {problem['input']!r}"
    if problem["type"] == "missing":
        return f"--{name.replace('_', '-')} is wanted (or {cls.model_config.get('env_prefix', '')}{name.upper()})"
    if problem["type"] == "extra_forbidden":
        return f"unknown option {name!r}{_did_you_mean(name, list(cls.model_fields))}"
    return f"{name}: {problem['msg']}, got {problem['input']!r}" if name else str(problem["msg"])


def _did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _refuse(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)
