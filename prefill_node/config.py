from pydantic import Field

from kvasir.node.config import NodeConfig


class PrefillConfig(NodeConfig, env_prefix="KVASIR_PREFILL_"):
    """A prefill node: computes prompts and hands their KV over."""

    listen: str = Field(default="127.0.0.1:50051", description="gRPC, for routers (host:port).")
    metrics_port: int = Field(default=8101, ge=0, le=65535, description="HTTP port of /metrics and /health.")
    max_num_seqs: int = Field(default=32, gt=0, description="Prompts that are computed at once.")
    # A chunk's blocks travel while the next one is computed. On a CPU, smaller chunks would compute more slowly, and
    # larger ones leave more to be moved after the last.
    max_num_batched_tokens: int = Field(default=512, gt=0, description="Tokens of one step: the size of a chunk.")
    max_num_queued_tokens: int = Field(
        default=65536, gt=0, description="Prompt tokens accepted and not computed yet; more is refused."
    )
