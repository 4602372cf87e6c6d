"""Turns a GGUF file of SmolLM2 or Gemma 3 into a Hugging Face directory: fp32 weights, tokenizer, chat template.

Everything comes out of the one file. What it does not expect it refuses by name, rather than write a model
that loads and talks nonsense.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from kvasir.cli import gguf_gemma3, gguf_smollm2


class Family(Protocol):
    """What differs between models: a module with these functions. `fields` are all fields of the file, by name."""

    def refuse_the_unknown(self, fields: dict[str, Any]) -> None: ...
    def model_config(self, fields: dict[str, Any]) -> dict[str, Any]: ...
    def generation_config(self, fields: dict[str, Any]) -> dict[str, Any]: ...
    def tokenizer(self, fields: dict[str, Any]) -> Tokenizer: ...
    def tokenizer_config(self, fields: dict[str, Any]) -> dict[str, Any]: ...
    def tensor(
        self, name: str, weight: NDArray[np.float32], config: dict[str, Any]
    ) -> tuple[str, NDArray[np.float32]]: ...


_FAMILIES: dict[str, Family] = {"llama": gguf_smollm2, "gemma3": gguf_gemma3}


def convert(gguf_path: Path, directory: Path, progress: Callable[[float], None]) -> None:
    """Write the model into `directory`, which exists; `progress` is told the share that is done.

    ValueError: the file holds something that cannot be converted.
    """
    reader = GGUFReader(gguf_path)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    architecture = fields.get("general.architecture")
    family = _FAMILIES.get(str(architecture))
    if family is None:
        raise ValueError(f"general.architecture is {architecture!r}; known are {', '.join(_FAMILIES)}")
    family.refuse_the_unknown(fields)
    config = family.model_config(fields)
    tokenizer = family.tokenizer(fields)

    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", family.generation_config(fields))
    _write_json(directory / "tokenizer_config.json", family.tokenizer_config(fields))
    tokenizer.save(str(directory / "tokenizer.json"))

    weights: dict[str, NDArray[np.float32]] = {}
    for count, tensor in enumerate(reader.tensors, start=1):
        name, weight = family.tensor(tensor.name, dequantize(tensor.data, tensor.tensor_type), config)
        weights[name] = np.ascontiguousarray(weight, dtype=np.float32)
        progress(0.9 * count / len(reader.tensors))
    weights_path = directory / "model.safetensors"
    save_file(weights, weights_path, metadata={"format": "pt"})
    weights_path.chmod(0o644)  # the library makes it readable for its owner alone
    progress(1.0)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
