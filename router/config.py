"""Everything the router can be told."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from kvasir.common.config import Keys, ServiceConfig, Words
from kvasir.router.http_bounds import HttpBounds


class RouterConfig(ServiceConfig, env_prefix="KVASIR_ROUTER_"):
    """The OpenAI API to the world, gRPC to the nodes."""

    host: str = Field(default="127.0.0.1", description="Address of the HTTP API.")
    port: int = Field(default=8000, ge=0, le=65535, description="Port of the HTTP API; 0 takes a free one.")
    model: Path | None = Field(default=None, description="Directory with the tokenizer and the chat template.")
    served_model_name: Words = Field(default=[], description="Names the API answers to; default: the model's own.")
    chat_template: str | None = Field(default=None, description="File with a Jinja template, instead of the model's.")
    trust_request_chat_template: bool = Field(
        default=False, description="A request may bring its own chat template; it is rendered in a process apart."
    )
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral"] = Field(
        default="auto", description="How the model writes calls of tools; auto: as its chat template does."
    )
    enable_auto_tool_choice: bool = Field(default=True, description="The model may call tools on its own account.")
    reasoning_parser: Literal["auto", "none", "deepseek_r1", "qwen3"] = Field(
        default="auto", description="How the model marks its thoughts; auto: as its chat template does."
    )
    response_store_url: str | None = Field(
        default=None, description="redis://... where responses are stored for several routers; default: in memory."
    )
    response_store_ttl_s: float = Field(default=3600.0 * 24, gt=0, description="How long responses are stored.")
    response_store_bytes: int = Field(default=256 << 20, gt=0, description="In memory, the oldest make room.")
    api_key: Keys = Field(default=[], description="Keys that clients must send one of; empty: anybody may ask.")
    api_key_file: Path | None = Field(
        default=None, description="More keys: a YAML list of {name, sha256, and limits of its own}."
    )
    requests_per_minute: int = Field(default=0, ge=0, description="Of one key, unless its entry says; 0: no limit.")
    tokens_per_minute: int = Field(default=0, ge=0, description="Of one key, prompts and answers; 0: no limit.")
    max_concurrent_requests: int = Field(default=0, ge=0, description="Of one key at once; 0: no limit.")
    limits_redis_url: str = Field(default="", description="Redis that several routers keep these limits in.")
    isolate_tenants: bool = Field(default=False, description="No key's prompts find what those of another have cached.")
    allowed_origins: Words = Field(default=[], description="Sites whose pages may ask (CORS); `*`: all of them.")
    allowed_methods: Words = Field(default=["*"], description="What these pages may do.")
    allowed_headers: Words = Field(default=["*"], description="What headers they may send.")
    allow_credentials: bool = Field(default=False, description="They may send a browser's own credentials.")
    max_request_bytes: int = Field(default=32 << 20, gt=0, description="Longest HTTP body; more is answered with 413.")
    max_grammar_bytes: int = Field(default=1 << 20, gt=0, description="Longest schema, pattern or grammar of a client.")
    grammar_timeout_s: float = Field(default=1.5, gt=0, description="One that takes longer to compile is refused.")
    grammar_workers: int = Field(default=2, gt=0, description="Processes that compile them, once the first has come.")
    max_resume_grace_s: float = Field(
        default=60.0, ge=0, description="Longest `resume_grace_s`: how long a stream waits for its client to come back."
    )
    max_resumable_streams: int = Field(default=256, ge=0, description="Streams that may ask for that at once.")
    max_resumable_streams_per_key: int | None = Field(
        default=None, ge=0, description="Of these, one key's; by default a half, if there are keys."
    )
    streams_redis_url: str = Field(
        default="", description="Redis that these are noted in: any of several routers can go on with them."
    )
    streams_redis_bytes: int = Field(default=256 << 20, gt=0, description="Most that one router notes there.")
    max_logprobs: int = Field(default=20, ge=0, description="Most alternatives a client may ask for.")
    workers: int = Field(
        default=1,
        ge=1,
        le=64,
        description="Processes that share the port. Limits of keys, stored responses and metrics are of all together; "
        "limits of the queue, of resumable streams and of grammar workers are divided among them.",
    )
    limit_concurrency: int = Field(default=8192, gt=0, description="Connections at once; more are refused with 503.")
    timeout_keep_alive_s: float = Field(default=75.0, gt=0, description="How long an idle connection is kept.")
    timeout_head_s: float = Field(default=30.0, gt=0, description="How long the head of a request may take to arrive.")
    timeout_body_s: float = Field(default=300.0, gt=0, description="How long the body of a request may take then.")
    shutdown_grace_s: float = Field(default=30.0, ge=0, description="How long requests may still run after SIGTERM.")
    log_level: Literal["debug", "info", "warning", "error"] = "info"

    grpc_listen: str = Field(default="127.0.0.1:8001", description="Where nodes announce themselves (host:port).")
    prefill: Words = Field(default=[], description="Prefill nodes that do not announce themselves: host:port of each.")
    decode: Words = Field(default=[], description="Decode nodes that do not announce themselves: host:port of each.")
    cluster_secret_file: Path | None = Field(
        default=None, description="Holds the cluster's secret; without it, KVASIR_CLUSTER_SECRET."
    )

    policy: Literal["prefix_aware", "least_loaded", "round_robin"] = Field(
        default="prefix_aware",
        description="Which nodes take a request: those that hold its prompt, until they are loaded; the least loaded; "
        "or all by turns.",
    )
    max_local_prefill_tokens: int = Field(
        default=64,
        ge=0,
        description="A decode node that holds most of a prompt computes so many tokens of it itself, where that is "
        "faster than the trip over a prefill node; 0: none.",
    )
    max_local_prompt_tokens: int = Field(
        default=0, ge=0, description="The same for prompts that are no longer than this, whatever it holds of them."
    )
    max_num_queued_reqs: int | None = Field(
        default=None, gt=0, description="More waiting requests are refused with 503; default: 8 for each seat there is."
    )
    max_num_queued_tokens: int | None = Field(
        default=None, gt=0, description="More waiting prompt tokens are refused; default: 8 times what the caches hold."
    )
    priority_aging_s: float = Field(
        default=10.0, ge=0, description="A waiting request gains one level of priority in so many seconds; 0: never."
    )
    request_timeout_s: float = Field(default=600.0, gt=0, description="Longest life of one request.")
    max_attempts: int = Field(default=8, gt=0, description="A request that loses this many nodes fails.")
    node_wait_s: float = Field(default=10.0, ge=0, description="How long a request waits for a node to come (back).")
    max_token_wait_s: float = Field(
        default=0.2, ge=0, description="While the router cannot keep up, tokens wait so long for those behind them."
    )
    heartbeat_timeout_s: float = Field(default=1.5, gt=0, description="A node silent for so long is lost.")
    engine_age_limit_s: float = Field(
        default=30.0, gt=0, description="A node whose engine has not finished a step for so long is lost."
    )
    canary_timeout_s: float = Field(default=30.0, gt=0, description="A canary generation must end within this.")

    @property
    def http_bounds(self) -> HttpBounds:
        return HttpBounds(
            limit_concurrency=self.limit_concurrency,
            timeout_head_s=self.timeout_head_s,
            timeout_body_s=self.timeout_body_s,
            timeout_keep_alive_s=self.timeout_keep_alive_s,
        )

    @property
    def max_resumable_streams_of_one(self) -> int | None:
        """One key's; None: all of them."""
        if self.max_resumable_streams_per_key is None and (self.api_key or self.api_key_file):
            return -(-self.max_resumable_streams // 2)
        return self.max_resumable_streams_per_key
