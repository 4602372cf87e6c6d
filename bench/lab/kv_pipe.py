"""A process that does what it is told, line by line, and its owner's end. Needs the standard library alone.

Both speak JSON: a question is {"do": verb, ...}, an answer any object; the first line of a process is its greeting.
"""

import json
import mmap
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from typing import IO, Any

_ANSWER_TIMEOUT_S = 120.0
_END_TIMEOUT_S = 10.0

Answer = dict[str, Any]


class Teller:
    """The answers of this process. What libraries print goes to standard error instead."""

    def __init__(self) -> None:
        self._pipe: IO[str] = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def tell(self, **answer: Any) -> None:
        self._pipe.write(json.dumps(answer) + "\n")


def serve(teller: Teller, verbs: Mapping[str, Callable[..., Answer]]) -> None:
    """Until the owner closes the pipe, or ends."""
    for line in sys.stdin:
        question = json.loads(line)
        teller.tell(**verbs[question.pop("do")](**question))


def touched_memory(num_bytes: int) -> mmap.mmap:
    """Zeros, in memory that is there; in large pages where the system gives them, as a node's cache is."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a system may be built without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(num_bytes)
    return memory


def checksum(memory: "memoryview | bytearray") -> int:
    """That the right bytes came, seen from outside."""
    return zlib.crc32(memory)


class Process:
    def __init__(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment}
        )
        self._command = " ".join(command[:4])
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.greeting: Answer = {}

    def greet(self) -> Answer:
        self.greeting = self._answer()
        return self.greeting

    def ask(self, do: str, **question: Any) -> Answer:
        assert self._process.stdin is not None, "asked for as a pipe"
        self._process.stdin.write(json.dumps({"do": do, **question}) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def pause(self) -> None:
        """Nothing of it computes, until `resume`."""
        self._process.send_signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        assert self._process.stdin is not None, "asked for as a pipe"
        self.resume()
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()

    def cpu_s(self) -> float:
        """What all its threads have computed so far."""
        tasks = Path(f"/proc/{self._process.pid}/task").glob("*/schedstat")
        return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9

    def _answer(self) -> Answer:
        try:
            line = self._lines.get(timeout=_ANSWER_TIMEOUT_S)
        except Empty:
            line = ""
        if not line:
            raise RuntimeError(f"{self._command}: no answer; see its messages above")
        answer: Answer = json.loads(line)
        return answer

    def _read(self) -> None:
        assert self._process.stdout is not None, "asked for as a pipe"
        with self._process.stdout as lines:
            for line in lines:
                self._lines.put(line)
        self._lines.put("")
