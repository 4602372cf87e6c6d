"""What is wrong with a command line, a configuration file or the environment, in one line for the user."""

import difflib
from itertools import groupby
from typing import Any

from pydantic import ValidationError
from pydantic_settings import BaseSettings


def explain_parsing(message: str, cls: type[BaseSettings]) -> str:
    """An error of argparse, or of pydantic's layer above it, in the user's words."""
    message = message.removeprefix("error parsing CLI: ")
    unknown = message.removeprefix("unrecognized arguments: ")
    if unknown != message:
        option = unknown.split()[0].split("=")[0]
        known = [f"--{name.replace('_', '-')}" for name in cls.model_fields]
        return f"unknown option {option}{did_you_mean(option, known)} (--help lists them all)"
    name = message.removeprefix("Parsing error encountered for ").partition(":")[0]
    if "not enough values to unpack" in message:
        return f"--{name.replace('_', '-')} wants name=value"
    return message


def explain_all(error: ValidationError, cls: type[BaseSettings]) -> list[str]:
    """One line for each option that is wrong, also if pydantic reports one error for each type that it might have."""
    lines = []
    for _, group in groupby(error.errors(), lambda problem: (problem["loc"][:1], repr(problem["input"]))):
        first, *others = group
        if others:
            name = ".".join(map(str, first["loc"][:-1]))  # the last part names the type
            reasons = " or ".join(problem["msg"] for problem in (first, *others))
            lines.append(f"{name}: {reasons}, got {first['input']!r}")
        else:
            lines.append(_explain(first, cls))
    return lines


def _explain(problem: Any, cls: type[BaseSettings]) -> str:
    name = ".".join(str(part) for part in problem["loc"])
    if problem["type"] == "missing" and len(problem["loc"]) > 1:
        return f"{name} is wanted"
    if problem["type"] == "model_type":
        return f"{name}: a JSON object is wanted, got {problem['input']!r}"
    if problem["type"] == "missing":
        return f"--{name.replace('_', '-')} is wanted (or {cls.model_config.get('env_prefix', '')}{name.upper()})"
    if problem["type"] == "extra_forbidden":
        known = list(cls.model_fields) if len(problem["loc"]) == 1 else []
        return f"unknown option {name!r}{did_you_mean(name, known)}"
    if problem["type"] == "value_error":  # raised by our own validators, whose messages are complete
        return f"{name}: {problem['ctx']['error']}" if name else str(problem["ctx"]["error"])
    return f"{name}: {problem['msg']}, got {problem['input']!r}"


def did_you_mean(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""
