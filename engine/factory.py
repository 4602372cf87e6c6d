"""Puts an engine together: model, KV cache, scheduler."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvasir.engine.blocks import KVLayout
from kvasir.engine.cuda_graphs import CudaCapture, can_be_captured
from kvasir.engine.cuda_memory import kv_budget_bytes, profile_memory
from kvasir.engine.engine import Engine
from kvasir.engine.forward_pass import Model
from kvasir.engine.host_blocks import HostBlocks
from kvasir.engine.identity import kv_identity
from kvasir.engine.kv_cache import KVCache, check_kv_dtype, default_budget_bytes, kv_layout, num_blocks_that_fit
from kvasir.engine.limits import Limits
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.config import ModelConfig, eos_token_ids
from kvasir.engine.models.loader import choose_dtype, load_model, quantization_on
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.settings import EngineSettings
from kvasir.engine.speculation.build import build_speculator, bytes_per_block, load_draft
from kvasir.engine.swap_space import SwapSpace
from kvasir.engine.tensor_parallel.group import ALONE, device_of_rank, within
from kvasir.engine.tensor_parallel.workers import Workers, start_workers
from kvasir.kernels import backend

log = logging.getLogger(__name__)

_SWAP_SHARE = 4  # by default, so many times smaller than the KV cache


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What others need to know of the model that an engine runs."""

    name: str
    kv_identity: bytes
    vocab_size: int
    eos_token_ids: frozenset[int]
    max_model_len: int
    dtype: str
    layout: KVLayout


def build_engine(settings: EngineSettings) -> tuple[Engine, KVCache, ModelInfo]:
    """Takes seconds: reads the weights, touches the cache's memory, compiles and warms up the kernels."""
    with ExitStack() as undo:
        engine, kv_cache, info = _build(settings, undo)
        engine.on_close = undo.pop_all().close
        return engine, kv_cache, info


def _build(settings: EngineSettings, undo: ExitStack) -> tuple[Engine, KVCache, ModelInfo]:
    """What is to be closed with the engine, or if it cannot be built, goes on `undo`."""
    from kvasir.engine.grammar import Grammars

    backend.use(settings.attention_backend)
    if settings.num_threads > 0:
        torch.set_num_threads(settings.num_threads)
    directory, device = Path(settings.model), torch.device(settings.device)
    config = read_model_config(directory)
    max_model_len = _max_model_len(settings, config)
    config = replace(config.for_length(max_model_len), quantization=quantization_on(device, settings.quantization))
    dtype = choose_dtype(settings.dtype, config, device)
    layout = kv_layout(config, settings.block_size, dtype, settings.kv_cache_dtype)
    check_kv_dtype(layout, dtype, device)
    workers: Workers | None = None
    if settings.tensor_parallel_size > 1:
        device = device_of_rank(device, 0)
        workers = start_workers(settings, config, dtype, layout, max_model_len)
        undo.callback(workers.close)
    draft = load_draft(settings, directory, config, max_model_len, device)
    with within(ALONE if workers is None else workers.group):
        model = load_model(directory, config, dtype, device)
    budget_bytes = settings.kv_cache_memory or _budget_bytes(settings, model, layout, max_model_len, device, workers)
    num_gpus = settings.tensor_parallel_size if device.type == "cuda" else 1
    num_blocks = num_blocks_that_fit(budget_bytes, bytes_per_block(layout, draft, num_gpus))
    if settings.max_model_len == "auto":
        max_model_len = min(max_model_len, num_blocks * settings.block_size)
    info = ModelInfo(
        name=directory.name,
        kv_identity=kv_identity(directory, config, layout),
        vocab_size=config.vocab_size,
        eos_token_ids=eos_token_ids(directory),
        max_model_len=max_model_len,
        dtype=str(dtype).removeprefix("torch."),
        layout=layout,
    )
    kv_cache = KVCache(layout, num_blocks, device) if workers is None else workers.make_cache(num_blocks, max_model_len)
    runner = ModelRunner(model, kv_cache, info.max_model_len, workers)
    log.info("warming up the kernels; the first start on a machine compiles them, which takes longest")
    runner.warm_up()
    if not settings.enforce_eager and can_be_captured(config, kv_cache.data):
        runner.capture_decodes(settings.max_num_seqs, CudaCapture(), settings.num_drafts)
    log.info("%s in %s on %s, %d threads", info.name, info.dtype, device, torch.get_num_threads())
    log.info("%s, in %s", capacity_of(num_blocks, settings.block_size, info.max_model_len), layout.dtype)
    scheduler = Scheduler(_limits(settings, info, num_blocks), info.kv_identity)
    scheduler.tables.swap = _swap_space(settings, kv_cache)
    grammars = Grammars(directory / "tokenizer.json", info.vocab_size, info.eos_token_ids)
    captures = not settings.enforce_eager
    speculator = build_speculator(settings.speculation, draft, scheduler, device, captures)
    return Engine(scheduler, runner, grammars=grammars, speculator=speculator), kv_cache, info


def _budget_bytes(
    settings: EngineSettings, model: Model, layout: KVLayout, max_model_len: int, device: torch.device,
    workers: Workers | None,
) -> int:  # fmt: skip
    if device.type == "cpu":
        return default_budget_bytes()
    if workers is not None:
        return workers.budget_bytes(model)
    profile = profile_memory(
        model, layout, max_model_len, settings.max_num_batched_tokens, settings.max_num_seqs, device,
        settings.num_drafts,
    )  # fmt: skip
    return kv_budget_bytes(profile, settings.gpu_memory_utilization)


def _max_model_len(settings: EngineSettings, config: ModelConfig) -> int:
    if settings.max_model_len is None or settings.max_model_len == "auto":
        return config.max_position
    if settings.max_model_len > config.longest:
        kinds = ", ".join(dict.fromkeys(rope.kind for rope in config.ropes))
        raise UnsupportedModel(
            f"max_model_len {settings.max_model_len} is more than the {config.longest} positions of this model "
            f"(rope type {kinds})"
        )
    return settings.max_model_len


def capacity_of(num_blocks: int, block_size: int, max_model_len: int) -> str:
    """(100, 16, 400) -> "KV cache of 100 blocks: 1,600 tokens, 4.00 requests of 400 tokens" """
    num_tokens = num_blocks * block_size
    requests = f"{num_tokens / max_model_len:.2f} requests of {max_model_len:,} tokens"
    return f"KV cache of {num_blocks:,} blocks: {num_tokens:,} tokens, {requests}"


def _swap_space(settings: EngineSettings, kv_cache: KVCache) -> SwapSpace:
    """A prefill node reserves a whole prompt or does not begin, and preempts nobody."""
    bytes_per_block = kv_cache.layout.bytes_per_block
    size = settings.swap_space
    if size and size < bytes_per_block:
        raise ValueError(f"swap_space of {size:,} bytes holds no block: one has {bytes_per_block:,} bytes")
    num_blocks = kv_cache.num_blocks // _SWAP_SHARE if size is None else size // bytes_per_block
    if settings.role == "prefill" or num_blocks == 0:
        return SwapSpace()
    return SwapSpace(num_blocks, HostBlocks(kv_cache, num_blocks))


def _limits(settings: EngineSettings, info: ModelInfo, num_blocks: int) -> Limits:
    return Limits(
        block_size=settings.block_size,
        num_blocks=num_blocks,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        max_num_seqs=settings.max_num_seqs,
        max_model_len=info.max_model_len,
        long_prefill_token_threshold=settings.long_prefill_token_threshold,
        watermark=settings.watermark,
        enable_prefix_caching=settings.enable_prefix_caching,
        scheduling_policy=settings.scheduling_policy,
        priority_aging_s=settings.priority_aging_s,
        max_num_partial_prefills=settings.max_num_partial_prefills,
        max_long_partial_prefills=settings.max_long_partial_prefills,
        target_itl_s=settings.target_itl_s,
    )
