from pydantic import Field

from kvasir.node.config import NodeConfig


class DecodeConfig(NodeConfig, env_prefix="KVASIR_DECODE_"):
    """A decode node: takes prompts' KV and generates."""

    listen: str = Field(default="127.0.0.1:50052", description="gRPC, for routers (host:port).")
    metrics_port: int = Field(default=8102, ge=0, le=65535, description="HTTP port of /metrics and /health.")
    max_num_seqs: int = Field(default=64, gt=0, description="Requests that are here at once, loading ones included.")
    # What a decode node computes of prompts holds up everybody's next token, so it comes in small pieces.
    max_num_batched_tokens: int = Field(default=256, gt=0, description="Tokens of one step.")
    kv_write_back: bool = Field(
        default=False,
        description="Stores: write the blocks that were filled here, answers too, for the next turn on any node.",
    )
    admission_timeout_s: float = Field(
        default=5.0, gt=0, description="A request that the engine has not admitted by then is refused."
    )
