"""Reads a Hugging Face directory: sharded or single safetensors, memory-mapped, one tensor at a time."""

import json
import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from kvasir.engine.models import model_class
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.llama import LlamaForCausalLM
from kvasir.engine.models.packed_checkpoint import Packing
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.kernels.linear import ON_CPU, Quantization, quantizing
from kvasir.kernels.quantized import GroupedWeight

log = logging.getLogger(__name__)

_LOG_EVERY_S = 2.0


def load_model(directory: Path, config: ModelConfig, dtype: torch.dtype, device: torch.device) -> LlamaForCausalLM:
    """The model with its weights. UnsupportedModel: a tensor is missing, or not what it should be; with its name."""
    if config.quantization in ON_CPU and (device.type != "cpu" or dtype != torch.float32):
        raise UnsupportedModel(f"quantization {config.quantization} wants a CPU and float32, not {device} and {dtype}")
    if config.quantization in ("int8-rows", "fp8") and device.type == "cpu":
        raise UnsupportedModel(f"quantization {config.quantization} wants a GPU")
    if config.quantization != "none" and config.packing is not None:
        raise UnsupportedModel(f"the checkpoint is quantized already ({config.packing.method})")
    with open_checkpoint(directory) as checkpoint, quantizing(config.quantization):
        progress = _Progress(directory, len(checkpoint.names))

        def weights(name: str) -> Tensor:
            progress.count()
            layer = name.removesuffix(".weight")
            if config.packing is not None and f"{layer}.qweight" in checkpoint:
                packed = _unpacked(config.packing, layer, checkpoint)
                if device.type == "cpu" and dtype == torch.float32:
                    return cast(Tensor, packed)  # see Weights: a linear layer takes either
                return packed.dequantized().to(device, dtype)
            return checkpoint.tensor(name).to(device, dtype)

        return model_class(config.architecture)(config, weights)


def _unpacked(packing: Packing, layer: str, checkpoint: "Checkpoint") -> GroupedWeight:
    if f"{layer}.g_idx" in checkpoint:
        packing.check_order(layer, checkpoint.tensor(f"{layer}.g_idx"))
    return packing.weight(layer, checkpoint.tensor)


def quantization_on(device: torch.device, option: Quantization) -> Quantization:
    """int8 is by groups on a CPU and by rows on a GPU: not the same weights, so what it is called differs too."""
    return "int8-rows" if option == "int8" and device.type != "cpu" else option


class _Progress:
    """A log line now and then, while a large model loads."""

    def __init__(self, directory: Path, num_tensors: int) -> None:
        self._directory = directory
        self._num_tensors = num_tensors
        self._num_loaded = 0
        self._told_s = time.monotonic()

    def count(self) -> None:
        self._num_loaded += 1
        if time.monotonic() - self._told_s > _LOG_EVERY_S:
            self._told_s = time.monotonic()
            log.info("loading %s: %d of %d tensors", self._directory, self._num_loaded, self._num_tensors)


def choose_dtype(option: str, config: ModelConfig, device: torch.device) -> torch.dtype:
    """`auto`: the checkpoint's own; but float32 on a CPU, where half precision products are slow.

    A model whose activations float16 cannot hold gets bfloat16 for it, or is refused where float16 was asked for.
    """
    if option == "auto":
        option = "float32" if device.type == "cpu" else config.checkpoint_dtype
        if option == "float16" and config.overflows_float16:
            option = "bfloat16"
    if option == "float16" and config.overflows_float16:
        raise UnsupportedModel(f"{config.architecture} overflows in float16; use bfloat16 or float32")
    known = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if option not in known:
        raise UnsupportedModel(f"unknown dtype {option!r}; known are auto, {', '.join(known)}")
    return known[option]


class Checkpoint:
    """Tensors by name, over all shards."""

    def __init__(self, shard_of: dict[str, Any]) -> None:
        self._shard_of = shard_of
        self.names = sorted(shard_of)

    def __contains__(self, name: str) -> bool:
        return name in self._shard_of

    def tensor(self, name: str) -> Tensor:
        """A view of the mapped file: read when it is used."""
        if name not in self._shard_of:
            raise UnsupportedModel(f"the checkpoint has no tensor {name}")
        tensor: Tensor = self._shard_of[name].get_tensor(name)
        return tensor


@contextmanager
def open_checkpoint(directory: Path) -> Iterator[Checkpoint]:
    from safetensors import SafetensorError, safe_open

    with ExitStack() as stack:
        shard_of: dict[str, Any] = {}
        for path in shard_paths(directory):
            try:
                shard = stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise UnsupportedModel(f"{path} is torn, or no safetensors file: {error}") from error
            shard_of.update(dict.fromkeys(shard.keys(), shard))
        yield Checkpoint(shard_of)


def shard_paths(directory: Path) -> list[Path]:
    index = directory / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else []
    paths = [directory / name for name in names or ["model.safetensors"]]
    for path in paths:
        if not path.is_file():
            raise UnsupportedModel(f"{path} is missing; weights must be in safetensors files")
    return paths
