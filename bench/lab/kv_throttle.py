"""A slow link: a TCP proxy in a thread, which lets so many bytes a second come back."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_CHUNK_BYTES = 64 << 10


class _Limit:
    """Shared by all connections."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._lock = threading.Lock()
        self._free_s = time.monotonic()

    def wait_for(self, num_bytes: int) -> None:
        with self._lock:
            self._free_s = max(self._free_s, time.monotonic()) + num_bytes / self._bytes_per_s
            free_s = self._free_s
        time.sleep(max(0.0, free_s - time.monotonic()))


@contextmanager
def slow_link(host: str, port: int, bytes_per_s: float) -> Iterator[int]:
    """To there; the port where it begins, on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        limit = _Limit(bytes_per_s)
        threading.Thread(target=_accept, args=(listener, (host, port), limit), daemon=True).start()
        yield listener.getsockname()[1]
        listener.shutdown(socket.SHUT_RDWR)


def _accept(listener: socket.socket, target: tuple[str, int], limit: _Limit) -> None:
    with suppress(OSError):
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(target)
            near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHUNK_BYTES)
            threading.Thread(target=_pump, args=(near, far, None), daemon=True).start()
            threading.Thread(target=_pump, args=(far, near, limit), daemon=True).start()


def _pump(source: socket.socket, sink: socket.socket, limit: _Limit | None) -> None:
    with suppress(OSError):
        while data := source.recv(_CHUNK_BYTES):
            if limit is not None:
                limit.wait_for(len(data))
            sink.sendall(data)
    for end in (source, sink):
        end.close()
