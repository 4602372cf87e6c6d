"""A whole decode step of an 8B-shaped model: our runner, CUDA graphs, random weights made on the device."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from kvasir.bench.lab.kernel_case import Prepared
from kvasir.engine.blocks import BlockId
from kvasir.engine.cuda_graphs import CudaCapture, can_be_captured
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.llama import LlamaForCausalLM
from kvasir.engine.request import Request, RequestId
from kvasir.engine.step import Chunk, StepPlan

BLOCK_SIZE = 16
EIGHT_B: Mapping[str, Any] = {  # Llama 3.1 8B
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def random_model(config: ModelConfig, dtype: torch.dtype, device: torch.device, seed: int = 7) -> LlamaForCausalLM:
    """Weights of a size that keeps activations of one size through all layers."""
    generator = torch.Generator(device).manual_seed(seed)

    def weights(name: str) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(config.hidden_size, dtype=dtype, device=device)
        shape = _shape_of(name, config)
        weight = torch.empty(shape, dtype=dtype, device=device)
        return weight.normal_(std=1.0 if "embed" in name else shape[1] ** -0.5, generator=generator)

    return LlamaForCausalLM(config, weights)


def _shape_of(name: str, config: ModelConfig) -> tuple[int, int]:
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, intermediate = config.hidden_size, config.intermediate_size
    shapes = {
        "embed_tokens": (config.vocab_size, hidden),
        "lm_head": (config.vocab_size, hidden),
        "q_proj": (queries, hidden),
        "k_proj": (keys, hidden),
        "v_proj": (keys, hidden),
        "o_proj": (hidden, queries),
        "gate_proj": (intermediate, hidden),
        "up_proj": (intermediate, hidden),
        "down_proj": (hidden, intermediate),
    }
    return shapes[name.split(".")[-2]]


def decode_plan(batch: int, context: int, block_size: int = BLOCK_SIZE) -> StepPlan:
    """Each sequence has `context` tokens, the new one included, and blocks of its own."""
    blocks_each = -(-context // block_size)
    requests = [
        Request(
            request_id=RequestId(str(i)),
            prompt_token_ids=[(7 * i + position) % 1000 for position in range(context)],
            block_table=[BlockId(i * blocks_each + block) for block in range(blocks_each)],
        )
        for i in range(batch)
    ]
    return StepPlan(tuple(Chunk(request, context - 1, 1) for request in requests))


def decode_step(batch: int, context: int, device: str, raw: Mapping[str, Any] = EIGHT_B) -> Prepared:
    """The step with all that the engine does in it: batch up, graph, logits, sampling, tokens back."""
    config = LlamaForCausalLM.read_config(raw)
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    model = random_model(config, dtype, place)
    layout = kv_layout(config, BLOCK_SIZE, dtype)
    kv_cache = KVCache(layout, batch * -(-context // BLOCK_SIZE), place)
    kv_cache.data.normal_()
    plan = decode_plan(batch, context)
    eager = ModelRunner(model, kv_cache, context)
    expected = eager.execute(plan)
    runner = ModelRunner(model, kv_cache, context)
    if can_be_captured(config, kv_cache.data):
        runner.capture_decodes(batch, CudaCapture())

    def check() -> None:
        assert runner.execute(plan) == expected, "the graph gives other tokens than the kernels one by one"

    itemsize = kv_cache.data.itemsize
    weights = num_weights(config) * itemsize
    keys_and_values = batch * context * layout.bytes_per_block // BLOCK_SIZE
    return Prepared(run=lambda: runner.execute(plan), check=check, amount=weights + keys_and_values)


def num_weights(config: ModelConfig) -> int:
    """That a step reads: all but the rows of the embedding that are not asked for."""
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    layer = sum(rows * columns for rows, columns in (_shape_of(f"{name}.weight", config) for name in names))
    rows, columns = _shape_of("lm_head.weight", config)
    return config.num_layers * layer + rows * columns
