"""What an engine can be asked about itself."""

from dataclasses import dataclass

from kvasir.common.prefill_speed import PrefillSpeed


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Gauges as they are now, and counters since the start."""

    step: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_loading: int = 0
    num_free_blocks: int = 0  # those that only the prefix cache holds are free
    num_total_blocks: int = 0
    num_queued_tokens: int = 0  # accepted, to be computed here, and not computed yet
    step_time_s: float = 0.0  # moving average over all steps
    decode_step_s: float = 0.0  # moving average over steps without prefill
    prefill_tokens_per_s: float = 0.0  # moving average over steps that were mostly prefill
    prefill_speed: PrefillSpeed | None = None  # None: no prompt has been computed yet
    num_preemptions: int = 0
    num_swaps: int = 0  # of them, with what was computed kept on the host
    num_refetches: int = 0  # of them, to be fetched again from a store
    num_host_blocks: int = 0  # in use, of the swap space
    num_prefix_queries_tokens: int = 0
    num_prefix_hits_tokens: int = 0
    num_prompt_tokens_computed: int = 0
    num_generation_tokens: int = 0
    num_recomputed_tokens: int = 0  # computed here though their blocks were wanted from elsewhere
    num_drafts: int = 0  # requests that had draft tokens, counted once a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0  # of those

    @property
    def kv_cache_usage(self) -> float:
        return 1 - self.num_free_blocks / self.num_total_blocks if self.num_total_blocks else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """One step, for whoever keeps histograms. Given to `Engine.on_step` on the engine's thread."""

    step: int
    step_time_s: float
    num_seqs: int
    num_prefill_tokens: int
    num_decode_tokens: int  # drafts among them
    queue_s: tuple[float, ...]  # of the requests admitted in this step
    sum_of_prefill_positions: int = 0  # over the prompt tokens in it
