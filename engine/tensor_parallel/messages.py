"""What rank 0 tells the others, over a pipe."""

import json
import struct
from dataclasses import dataclass, fields
from typing import IO, Any

import numpy as np

from kvasir.engine.batch import HostBatch

_LENGTH = struct.Struct("<I")

# A message: the length of its description, the description (JSON), then the bytes of its arrays.


@dataclass(frozen=True, slots=True, kw_only=True)
class MakeCache:
    """The first command; it is answered by a line."""

    num_blocks: int
    max_model_len: int
    path: str  # of this rank's part, to be mapped; empty: on a GPU, the rank's own memory


@dataclass(frozen=True, slots=True)
class CaptureDecodes:
    """All ranks do it at the same time."""


Command = MakeCache | CaptureDecodes | HostBatch
_KINDS: dict[str, type[Command]] = {kind.__name__: kind for kind in (MakeCache, CaptureDecodes, HostBatch)}


def write_command(stream: IO[bytes], command: Command) -> None:
    """Raises OSError if nobody reads any more."""
    arrays: list[bytes] = []

    def described(value: Any) -> Any:
        if isinstance(value, np.ndarray):
            arrays.append(value.tobytes())
            return {"dtype": value.dtype.str, "shape": list(value.shape)}
        return value

    values = {field.name: described(getattr(command, field.name)) for field in fields(command)}
    text = json.dumps({"kind": type(command).__name__, "values": values}).encode()
    stream.write(b"".join((_LENGTH.pack(len(text)), text, *arrays)))
    stream.flush()


def read_command(stream: IO[bytes]) -> Command | None:
    """None: there will be no more. Raises EOFError if the stream ends within a message."""
    length = stream.read(_LENGTH.size)
    if not length:
        return None
    description = json.loads(_exactly(stream, _LENGTH.unpack(length)[0]))

    def value_of(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        out = np.empty(value["shape"], np.dtype(value["dtype"]))
        out.reshape(-1).view(np.uint8)[:] = np.frombuffer(_exactly(stream, out.nbytes), np.uint8)
        return out

    values = {name: value_of(value) for name, value in description["values"].items()}
    return _KINDS[description["kind"]](**values)


def _exactly(stream: IO[bytes], num_bytes: int) -> bytes:
    content = stream.read(num_bytes)
    if len(content) < num_bytes:
        raise EOFError("the stream ended within a message")
    return content
