"""What an engine can be told. Option names are vLLM's."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:  # an engine needs torch, Triton and numpy, and no parser of configurations
    from kvasir.common.speculative_config import SpeculativeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    model: str  # a Hugging Face model directory
    role: Literal["prefill", "decode"] = "decode"
    dtype: str = "auto"  # the checkpoint's; on a CPU float32
    # Of the weights of linear layers; on a GPU int8 and fp8, on a CPU all others; w8a8 and w4a8: activations in 8 bits.
    quantization: Literal["none", "fp16", "int8", "int4", "w8a8_int8", "w4a8_int8", "fp8"] = "none"
    device: str = "cpu"
    attention_backend: Literal["auto", "triton", "torch"] = "auto"  # of all kernels, in the whole process
    enforce_eager: bool = False  # no CUDA graphs
    tensor_parallel_size: int = 1  # ranks, processes of this machine, that compute the model together
    num_threads: int = 0  # compute threads, on a CPU; 0: as many as torch chooses
    max_model_len: int | Literal["auto"] | None = None  # None: what the model allows; auto: and the KV cache holds
    block_size: int = 16
    kv_cache_dtype: Literal["auto", "fp32", "float32", "fp16", "float16", "int8"] = "auto"  # auto: the model's
    kv_cache_memory: int | None = None  # bytes; None: a share of what is free, on a GPU told by a profile run
    gpu_memory_utilization: float = 0.9  # of its memory, all that this process may take
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    long_prefill_token_threshold: int = 0
    watermark: float = 0.01
    enable_prefix_caching: bool = True
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    priority_aging_s: float = 0.0
    max_num_partial_prefills: int = 0
    max_long_partial_prefills: int = 0
    target_itl_s: float = 0.0
    speculation: "SpeculativeConfig | None" = None
    swap_space: int | None = 0  # bytes; None: a quarter of the KV cache's

    @property
    def num_drafts(self) -> int:
        """Tokens drafted for a sequence in a step, at most"""
        return 0 if self.speculation is None else self.speculation.num_speculative_tokens
