"""Everything `kvasir serve` can be told."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from kvasir.common.config import Keys, ServiceConfig, Words
from kvasir.common.speculative_config import SpeculativeConfig

OptionValue = str | int | float | bool


class ServeConfig(ServiceConfig, env_prefix="KVASIR_SERVE_", cli_hide_none_type=True):
    """A whole cluster on this machine: a router, prefill nodes and decode nodes, each a process of its own."""

    model: Path | None = Field(default=None, description="Hugging Face directory; default: the built-in model.")
    served_model_name: Words = Field(default=[], description="Names the API answers to; default: the model's own.")
    prefill: int = Field(default=1, ge=0, le=64, description="How many prefill nodes.")
    decode: int = Field(default=1, ge=1, le=64, description="How many decode nodes.")
    host: str = Field(default="127.0.0.1", description="Address of the HTTP API.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of the HTTP API; 0 takes a free one.")
    api_key: Keys = Field(default=[], repr=False, description="Keys that clients must send one of.")

    connector: str = Field(
        default="tcp", description="How KV blocks travel: tcp, redis, shared_storage, nixl, mooncake, module:Class."
    )
    redis_url: str | None = Field(default=None, repr=False, description="Default: a server of our own is started.")
    kv_path: Path | None = Field(default=None, description="Folder of shared_storage; default: one that ends with us.")

    dtype: str | None = Field(default=None, description="Of weights and KV; default: the model's.")
    max_model_len: Annotated[int, Field(gt=0)] | Literal["auto"] | None = Field(
        default=None, description="Longest prompt and answer together; auto: what fits the KV cache."
    )
    block_size: int | None = Field(default=None, gt=0, description="Tokens in a KV block.")
    max_num_seqs: int | None = Field(default=None, gt=0, description="Most requests in one step of a node.")
    max_num_batched_tokens: int | None = Field(default=None, gt=0, description="Most tokens in one step of a node.")
    kv_cache_memory: str | None = Field(default=None, description="Of each node, as 2GiB; default: by free memory.")
    speculative_config: SpeculativeConfig | None = Field(
        default=None, description="Speculative decoding on the decode nodes, as JSON; see `kvasir decode --help`."
    )
    pin_cores: bool = Field(default=True, description="Keep each node on cores of its own, while there are enough.")

    router_options: dict[str, OptionValue] = Field(
        default={}, description="More options, as policy=least_loaded; repeatable."
    )
    prefill_options: dict[str, OptionValue] = Field(default={}, description="More options of the prefill nodes.")
    decode_options: dict[str, OptionValue] = Field(default={}, description="More options of the decode nodes.")

    start_timeout_s: float = Field(default=300.0, gt=0, description="Give up if not ready by then.")
    shutdown_grace_s: float = Field(default=10.0, ge=0, description="Requests have this long to finish at the end.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"
