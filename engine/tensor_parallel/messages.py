"""What rank 0 tells the others: a step's inputs, over a pipe."""

import json
import struct
from dataclasses import fields
from typing import IO, Any

import torch
from torch import Tensor

from kvasir.engine.batch import BatchInputs
from kvasir.kernels.block_bytes import tensor_bytes

_LENGTH = struct.Struct("<I")

# A message: the length of its description, the description (JSON), then the bytes of its tensors.


def write_batch(stream: IO[bytes], batch: BatchInputs) -> None:
    """Tensors on the CPU. Raises OSError if nobody reads any more."""
    tensors: list[Tensor] = []

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value.contiguous())
            return {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        return [described(one) for one in value] if isinstance(value, tuple) else value

    text = json.dumps({field.name: described(getattr(batch, field.name)) for field in fields(batch)}).encode()
    payloads = [tensor_bytes(tensor) for tensor in tensors]
    stream.write(b"".join((_LENGTH.pack(len(text)), text, *payloads)))
    stream.flush()


def read_batch(stream: IO[bytes]) -> BatchInputs | None:
    """None: there will be no more. Raises EOFError if the stream ends within a message."""
    length = stream.read(_LENGTH.size)
    if not length:
        return None
    description = json.loads(_exactly(stream, _LENGTH.unpack(length)[0]))

    def tensor_of(value: Any) -> Any:
        if isinstance(value, dict):
            dtype: torch.dtype = getattr(torch, value["dtype"])
            empty = torch.empty(value["shape"], dtype=dtype)
            if empty.numel():
                content = bytearray(_exactly(stream, empty.numel() * dtype.itemsize))
                empty = torch.frombuffer(content, dtype=dtype).view(value["shape"])
            return empty
        return tuple(tensor_of(one) for one in value) if isinstance(value, list) else value

    return BatchInputs(**{name: tensor_of(value) for name, value in description.items()})


def _exactly(stream: IO[bytes], num_bytes: int) -> bytes:
    content = stream.read(num_bytes)
    if len(content) < num_bytes:
        raise EOFError("the stream ended within a message")
    return content
