"""What the scheduler must keep to."""

from dataclasses import dataclass
from math import inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler must keep to. Found at start, never changed."""

    block_size: int
    num_blocks: int
    max_num_batched_tokens: int
    max_num_seqs: int
    max_model_len: int
    long_prefill_token_threshold: int = 0  # 0: no limit of its own
    watermark: float = 0.01  # share of blocks kept free when a newcomer is admitted
    enable_prefix_caching: bool = True
    scheduling_policy: str = "fcfs"  # or "priority"
    priority_aging_s: float = 0.0  # a waiting request gains one level in so many seconds; 0: none, ever
    max_num_partial_prefills: int = 0  # prompts that may be partly computed at once; 0: any number
    max_long_partial_prefills: int = 0  # of them, longer than `long_prefill_token_threshold`; 0: any number
    target_itl_s: float = 0.0  # prompts are computed in pieces that let those who decode keep to it; 0: no target

    def __post_init__(self) -> None:
        for name in ("block_size", "num_blocks", "max_num_batched_tokens", "max_num_seqs", "max_model_len"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be in [0, 1), got {self.watermark}")
        for name in (
            "long_prefill_token_threshold",
            "max_num_partial_prefills",
            "max_long_partial_prefills",
            "priority_aging_s",
            "target_itl_s",
        ):
            if not 0 <= getattr(self, name) < inf:
                raise ValueError(f"{name} must be at least 0 and finite, got {getattr(self, name)}")
        if self.scheduling_policy not in ("fcfs", "priority"):
            raise ValueError(f"scheduling_policy must be fcfs or priority, got {self.scheduling_policy!r}")
