"""A model directory from a GGUF file, with its progress on the terminal."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

Progress = Callable[[str, float], None]
"""Told the name of a phase and the share of it that is done; each phase begins with 0 and ends with 1."""


class ModelPreparationError(Exception):
    """A model directory cannot be made. The message says why, and what would help."""


def show_progress(phase: str, done: float) -> None:
    """On a terminal one line that counts up; elsewhere one line when a phase begins and one when it ends."""
    if sys.stderr.isatty():
        print(f"\r{phase}: {done:4.0%}", end="\n" if done >= 1 else "", file=sys.stderr, flush=True)
    elif done in (0, 1):
        print(f"{phase}: {'done' if done else '...'}", file=sys.stderr, flush=True)


def convert_gguf(gguf_path: Path, directory: Path, progress: Progress = show_progress) -> Path:
    """Make a model directory, which must not exist yet, from a GGUF file: completely or not at all."""
    if directory.exists():
        raise ModelPreparationError(f"{directory} exists already")
    aside = directory.with_name(f".{directory.name}.{os.getpid()}.partial")
    try:
        aside.mkdir(parents=True)
        convert(gguf_path, aside, progress)
        aside.rename(directory)
    except (OSError, ValueError, KeyError) as error:  # KeyError: a field that every such file should have
        raise ModelPreparationError(f"{gguf_path} cannot be converted: {error}") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return directory


def convert(gguf_path: Path, directory: Path, progress: Progress) -> None:
    """Convert the file into an existing, empty directory. Raises OSError, ValueError or KeyError."""
    from kvasir.cli.gguf_to_hf import convert as convert_tensors  # late: a prepared model needs none of its libraries

    phase = "converting it to fp32 safetensors"
    progress(phase, 0.0)
    convert_tensors(gguf_path, directory, lambda done: progress(phase, min(done, 0.99)))
    progress(phase, 1.0)
