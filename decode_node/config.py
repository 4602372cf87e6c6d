from typing import Any, Self

from pydantic import Field, model_validator

from kvasir.common.speculative_config import SpeculativeConfig
from kvasir.node.config import Memory, NodeConfig


class DecodeConfig(NodeConfig, env_prefix="KVASIR_DECODE_"):
    """A decode node: takes prompts' KV and generates."""

    listen: str = Field(default="127.0.0.1:50052", description="gRPC, for routers (host:port).")
    metrics_port: int = Field(default=8102, ge=0, le=65535, description="HTTP port of /metrics and /health.")
    max_num_seqs: int = Field(default=64, gt=0, description="Requests that are here at once, loading ones included.")
    # What a decode node computes of prompts holds up everybody's next token, so it comes in small pieces.
    max_num_batched_tokens: int = Field(default=256, gt=0, description="Tokens of one step.")
    target_itl_ms: float = Field(
        default=0.0,
        ge=0,
        description="Prompts are computed here in pieces that let others have their next token in time; 0: no target.",
    )
    swap_space: Memory | None = Field(
        default=None,
        ge=0,
        description="Host memory for what preempted requests have computed (1GiB); 0: none; default: a quarter of the "
        "KV cache's.",
    )
    speculative_config: SpeculativeConfig | None = Field(
        default=None,
        description='Speculative decoding, as JSON: {"method": "ngram", "num_speculative_tokens": 4}, and '
        'prompt_lookup_max and prompt_lookup_min, or {"model": DIRECTORY, "num_speculative_tokens": 3}.',
    )
    kv_write_back: bool = Field(
        default=False,
        description="Stores: write the blocks that were filled here, answers too, for the next turn on any node.",
    )
    admission_timeout_s: float = Field(
        default=5.0, gt=0, description="A request that the engine has not admitted by then is refused."
    )

    def engine_options(self) -> dict[str, Any]:
        return {
            "target_itl_s": self.target_itl_ms / 1000,
            "swap_space": self.swap_space,
            "speculation": self.speculative_config,
        }

    @model_validator(mode="after")
    def _has_room_for_prompts(self) -> Self:
        """Else those who decode could take every step for themselves."""
        if self.max_num_batched_tokens < self.max_num_seqs:
            wanted, given = self.max_num_seqs, self.max_num_batched_tokens
            raise ValueError(f"max_num_batched_tokens of {given} is less than max_num_seqs of {wanted}")
        return self
