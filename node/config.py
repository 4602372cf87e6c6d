"""What prefill and decode nodes can both be told. Names are vLLM's where it has one."""

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, field_validator, model_validator

from kvasir.common.addresses import split_address
from kvasir.common.config import ServiceConfig, Words
from kvasir.common.sizes import parse_bytes, parse_cpus

Memory = Annotated[int, BeforeValidator(parse_bytes)]


class NodeConfig(ServiceConfig):
    model: Path = Field(description="Directory of the model, as Hugging Face lays it out.")
    served_model_name: str = Field(default="", description="What routers call it; default: the directory's name.")

    listen: str = Field(description="gRPC, for routers (host:port). Off loopback the cluster secret is required.")
    advertise_host: str = Field(default="", description="Where others reach this node, if not where it listens.")
    join: Words = Field(default=[], description="Routers to announce this node to (host:port); repeatable.")
    metrics_port: int = Field(ge=0, le=65535, description="HTTP port of /metrics and /health; 0 takes a free one.")
    cluster_secret_file: Path | None = Field(
        default=None, description="Holds the cluster's secret; without it, KVASIR_CLUSTER_SECRET."
    )
    drain_grace_s: float = Field(default=30.0, ge=0, description="After SIGTERM, requests have this long to finish.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    connector: str = Field(
        default="tcp", description="How KV blocks travel: tcp, redis, shared_storage, an installed one, module:Class."
    )
    kv_listen: str = Field(
        default="",
        description="Where others fetch blocks from (host:port; no interface's name); default: any free port.",
    )
    kv_encryption: bool = Field(
        default=False,
        description="tcp: encrypt blocks, with keys derived from the cluster's secret; on all nodes or none.",
    )
    redis_url: str = Field(
        default="redis://127.0.0.1:6379/0",
        repr=False,
        description="redis: rediss://user:password@host:port/db; TLS or not.",
    )
    redis_prefix: str = Field(default="kvasir", min_length=1, description="redis: what our keys begin with.")
    kv_options: dict[str, str] = Field(default={}, description="Options of a connector of your own, as key=value.")
    kv_path: str = Field(default="", description="shared_storage: the shared folder.")
    kv_quota: Memory | None = Field(
        default=None, gt=0, description="shared_storage: most that it holds (100GiB); default: half of what is free."
    )
    kv_codec: Literal["auto", "none", "lossless", "fp16", "int8", "fp8"] = Field(
        default="none",
        description="How this node packs blocks on their way out; auto: none or lossless, by measured bandwidth.",
    )
    kv_fetch: Literal["auto", "always"] = Field(
        default="auto",
        description="auto: what is slower to fetch than to compute here is computed; always: fetched all the same.",
    )
    lease_s: float = Field(default=30.0, gt=0, description="Blocks that nobody has fetched are freed after this.")
    store_ttl_s: float = Field(default=3600.0, gt=0, description="Stores: blocks unused for so long are dropped.")

    device: str = Field(default="cpu", description="cpu, cuda, cuda:1, ...")
    tensor_parallel_size: int = Field(
        default=1,
        gt=0,
        description="Processes that compute the model together; each on a GPU of its own, from `device` on.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    quantization: Literal["none", "fp16", "int8", "int4", "w8a8_int8", "w4a8_int8", "fp8"] = Field(
        default="none",
        description="Weights in fewer bits. On a CPU: fp16; int8, int4 in groups of 32; w8a8_int8, w4a8_int8: so, and "
        "activations in 8 bits, which is faster for many at once. On a GPU: int8, fp8 by row.",
    )
    attention_backend: Literal["auto", "triton", "torch"] = Field(
        default="auto",
        description="Kernels on a GPU: ours in Triton, or torch's, the yardstick; auto: triton if there.",
    )
    enforce_eager: bool = Field(
        default=False, description="No CUDA graphs: every kernel of a step is launched by itself."
    )
    max_model_len: Annotated[int, Field(ge=2)] | Literal["auto"] | None = Field(
        default=None, description="Longest request in tokens; auto: what fits the KV cache; default: the model's."
    )
    block_size: int = Field(default=16, gt=0, description="Tokens of one KV block.")
    kv_cache_dtype: Literal["auto", "fp32", "float32", "fp16", "float16", "int8"] = Field(
        default="auto", description="What keys and values are kept in, on a CPU; auto: as the model is computed."
    )
    kv_cache_memory: Memory | None = Field(
        default=None, gt=0, description="Memory of the KV cache (2GiB); default: a sensible share of what is free."
    )
    gpu_memory_utilization: float = Field(
        default=0.9, gt=0, le=1, description="Share of a GPU's memory that this node may take, weights and all."
    )
    enable_prefix_caching: bool = Field(default=True, description="Keep freed blocks for prompts that begin alike.")
    max_num_seqs: int = Field(gt=0, description="Requests that run at once.")
    max_num_batched_tokens: int = Field(gt=0, description="Tokens of one step.")
    long_prefill_token_threshold: int = Field(default=0, ge=0, description="Most tokens of one prompt a step; 0: all.")
    max_num_partial_prefills: int = Field(
        default=0, ge=0, description="Prompts that may be partly computed at once; 0: any number."
    )
    max_long_partial_prefills: int = Field(
        default=0,
        ge=0,
        description="Of them, longer than long_prefill_token_threshold: shorter ones may pass; 0: any number.",
    )
    watermark: float = Field(default=0.01, ge=0, lt=1, description="Share of blocks kept free of newcomers.")
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="Who is computed first, and gives way last; priority: the lower it is, the earlier."
    )
    priority_aging_s: float = Field(
        default=10.0, ge=0, description="priority: a waiting request gains one level in so many seconds; 0: never."
    )
    threads: int | None = Field(default=None, gt=0, description="Compute threads; default: one a CPU it may use.")
    cpus: str = Field(default="", coerce_numbers_to_str=True, description="CPUs to stay on (0,2-4); default: all.")

    def engine_options(self) -> dict[str, Any]:
        """Settings of the engine that only one kind of node has."""
        return {}

    @model_validator(mode="after")
    def _says_what_is_long(self) -> Self:
        if self.max_long_partial_prefills and not self.long_prefill_token_threshold:
            raise ValueError("max_long_partial_prefills needs long_prefill_token_threshold: it says what is long")
        if 0 < self.max_num_partial_prefills < self.max_long_partial_prefills:
            most, long = self.max_num_partial_prefills, self.max_long_partial_prefills
            raise ValueError(f"max_long_partial_prefills of {long} is more than max_num_partial_prefills of {most}")
        return self

    @field_validator("listen", "kv_listen", "join")
    @classmethod
    def _are_addresses(cls, value: str | list[str]) -> str | list[str]:
        for address in [value] if isinstance(value, str) else value:
            if address:
                split_address(address)
        return value

    @field_validator("cpus")
    @classmethod
    def _are_cpus(cls, value: str) -> str:
        if value:
            parse_cpus(value)
        return value
