"""What compiles the loops: numba, for which CPU, and where its code is kept."""

import hashlib
import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Protocol, TypeVar, cast

# By name, since what types they have says less than it seems to.
numba: Any = import_module("numba")
types: Any = numba.types
extending: Any = import_module("numba.extending")
cgutils: Any = import_module("numba.core.cgutils")
ir: Any = cgutils.ir
carray: Callable[..., Any] = numba.carray

log = logging.getLogger(__name__)


def _cpu_features() -> dict[str, bool]:
    """What the loops are compiled for: this CPU, or what NUMBA_CPU_FEATURES says ("+avx2,+fma,...")."""
    chosen = numba.config.CPU_FEATURES
    if chosen is None:
        return dict(import_module("llvmlite.binding").get_host_cpu_features())
    return {name[1:]: name.startswith("+") for name in chosen.split(",") if name}


CPU_FEATURES = _cpu_features()
IS_WIDE = bool(CPU_FEATURES.get("avx512f"))

_UNUSED_VERSIONS_STAY_S = 30 * 86400.0
_FAST = {"reassoc", "nsz", "contract", "arcp", "afn"}  # not nnan and ninf: NaN must come through
_Function = TypeVar("_Function", bound=Callable[..., Any])


class Loop(Protocol):
    """A compiled C function void(int64 *arguments)."""

    @property
    def address(self) -> int: ...

    def ctypes(self, arguments: Any) -> None: ...


def _keeps_compiled_code() -> bool:
    """Has numba keep it where it can be written; False: nowhere."""
    try:
        folder = _folder_of_this_version()
        folder.mkdir(parents=True, exist_ok=True)
        TemporaryFile(dir=folder).close()
        os.utime(folder)
        _remove_unused(folder.parent)
    except (OSError, RuntimeError) as reason:  # RuntimeError: nobody knows where home is
        log.warning("the loops are compiled at each start, for they cannot be kept (%s); see NUMBA_CACHE_DIR", reason)
        return False
    numba.config.CACHE_DIR = str(folder)
    return True


def _folder_of_this_version() -> Path:
    # numba looks at the file of a function alone, and would not see that a helper in another file has changed.
    # A folder named after all of the code cannot be stale; and the user's cache can be written where the code cannot.
    here = Path(__file__).parent
    sources = sorted((*here.parent.glob("*.py"), *here.glob("*.py")))
    version = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    base = Path(chosen) if chosen else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"
    return base / "compiled" / version


def _remove_unused(versions: Path) -> None:
    """What no process has started with for long: an update leaves the code of the version before behind."""
    for other in versions.iterdir():
        with suppress(FileNotFoundError):  # another process has removed it
            is_version = re.fullmatch("[0-9a-f]{16}", other.name) is not None
            if is_version and time.time() - other.stat().st_mtime > _UNUSED_VERSIONS_STAY_S:
                shutil.rmtree(other, ignore_errors=True)


_CACHE = _keeps_compiled_code()


def compiled(function: _Function) -> _Function:
    """A helper of a loop, and kept with it alone.

    On its own it would be kept by its types, and two processes that do so for different types at the same moment can
    leave the one's code under the other's.
    """
    options = {"nogil": True, "fastmath": _FAST, "error_model": "numpy"}
    return cast(_Function, numba.njit(**options)(function))


def strict(function: _Function) -> _Function:
    """A helper of a loop whose results must be the same on every machine, to the last bit.

    It says so, or it would be as relaxed as what happens to be compiled first of all that calls it.
    """
    return cast(_Function, numba.njit(nogil=True, error_model="numpy", fastmath=False)(function))


def loop(function: Callable[[Any], None]) -> Loop:
    """What `threads.launch` can start: it gets [counter, arguments...], 64 bits each."""
    signature = types.void(types.CPointer(types.int64))
    return cast(Loop, numba.cfunc(signature, cache=_CACHE)(function))


class _LazyLoop:
    def __init__(self, function: Callable[[Any], None]) -> None:
        self._function = function

    @cached_property
    def _compiled(self) -> Loop:
        return loop(self._function)

    @property
    def address(self) -> int:
        return self._compiled.address

    def ctypes(self, arguments: Any) -> None:
        self._compiled.ctypes(arguments)


def lazy_loop(function: Callable[[Any], None]) -> Loop:
    """A loop that is compiled when it is first used: one of several, of which a process needs one."""
    return _LazyLoop(function)


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """A helper in LLVM's own words: gives the types of its arguments and result, and writes its code."""
    return cast(Callable[..., Any], extending.intrinsic(function))


def overload(function: Callable[..., Any]) -> Callable[[_Function], _Function]:
    """What `function` is in compiled code."""
    return cast(Callable[[_Function], _Function], extending.overload(function))
