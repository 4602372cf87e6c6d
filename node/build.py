"""From a node's options to its parts. The only file here that imports torch, and it must be imported late."""

import uuid
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch

from kvasir.common.addresses import split_address
from kvasir.common.metrics import Metrics
from kvasir.engine.factory import build_engine
from kvasir.engine.settings import EngineSettings
from kvasir.kv_connector.base import KVConnector
from kvasir.kv_connector.costs import ALWAYS_FETCH, CostRule
from kvasir.kv_connector.registry import open_connector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.node.announce import own_address
from kvasir.node.config import NodeConfig
from kvasir.node.metrics import NodeMetrics
from kvasir.node.parts import NodeParts
from kvasir.node.process import num_compute_threads


def build(
    config: NodeConfig,
    role: Literal["prefill", "decode"],
    secret: str | None,
    check_connector: Callable[[KVConnector], None],
) -> NodeParts:
    """Takes seconds: loads the model. A wrong device or connector is found before that."""
    check_device(config.device)
    settings = connector_settings(config, secret)
    connector = open_connector(settings)
    check_connector(connector)
    engine, memory, model = build_engine(engine_settings(config, role))
    model = replace(model, name=config.served_model_name or model.name)
    return NodeParts(
        engine=engine,
        memory=memory,
        connector=connector,
        connector_settings=settings,
        metrics=NodeMetrics(Metrics({"model_name": model.name, "engine": "0"})),
        epoch=uuid.uuid4().hex,
        model=model,
    )


def check_device(name: str) -> None:
    """ValueError if it is not here."""
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or not (number or "0").isdecimal():
        raise ValueError(f"device must be cpu, cuda, cuda:1, ..., got {name!r}")
    num_gpus = torch.cuda.device_count()
    if kind == "cuda" and int(number or 0) >= num_gpus:
        raise ValueError(f"there is no device {name} here: torch sees {num_gpus} GPUs")


def engine_settings(config: NodeConfig, role: Literal["prefill", "decode"]) -> EngineSettings:
    return EngineSettings(
        model=str(config.model),
        role=role,
        dtype=config.dtype,
        quantization=config.quantization,
        device=config.device,
        attention_backend=config.attention_backend,
        enforce_eager=config.enforce_eager,
        tensor_parallel_size=config.tensor_parallel_size,
        num_threads=num_compute_threads(config),
        max_model_len=config.max_model_len,
        block_size=config.block_size,
        kv_cache_dtype=config.kv_cache_dtype,
        kv_cache_memory=config.kv_cache_memory,
        gpu_memory_utilization=config.gpu_memory_utilization,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
        watermark=config.watermark,
        enable_prefix_caching=config.enable_prefix_caching,
        scheduling_policy=config.scheduling_policy,
        priority_aging_s=config.priority_aging_s,
        max_num_partial_prefills=config.max_num_partial_prefills,
        max_long_partial_prefills=config.max_long_partial_prefills,
        **config.engine_options(),
    )


def connector_settings(config: NodeConfig, secret: str | None) -> ConnectorSettings:
    """KV is served where gRPC is, unless told otherwise."""
    host, port = split_address(config.kv_listen) if config.kv_listen else (split_address(config.listen)[0], 0)
    return ConnectorSettings(
        name=config.connector,
        listen_host=host,
        listen_port=port,
        advertise_host=config.advertise_host or own_address(host, config.join),
        secret=secret or "",
        encryption=config.kv_encryption,
        codec=config.kv_codec,
        costs=ALWAYS_FETCH if config.kv_fetch == "always" else CostRule(),
        redis_url=config.redis_url,
        redis_prefix=config.redis_prefix,
        path=config.kv_path,
        options=config.kv_options,
        kv_quota_bytes=config.kv_quota,
        store_ttl_s=config.store_ttl_s,
        lease_s=config.lease_s,
    )
