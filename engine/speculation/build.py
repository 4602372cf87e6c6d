"""From an engine's settings to its speculator."""

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from kvasir.engine.blocks import KVLayout
from kvasir.engine.cuda_graphs import CudaCapture, can_be_captured
from kvasir.engine.kv_cache import KVCache, check_kv_dtype, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.config import ModelConfig
from kvasir.engine.models.llama import LlamaForCausalLM
from kvasir.engine.models.loader import choose_dtype, load_model
from kvasir.engine.models.unsupported import UnsupportedModel
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.settings import EngineSettings
from kvasir.engine.speculation.draft_model import DraftModel
from kvasir.engine.speculation.ngram import NgramProposer
from kvasir.engine.speculation.speculator import Speculator

if TYPE_CHECKING:
    from kvasir.common.speculative_config import SpeculativeConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Draft:
    """A draft model that fits the target, and is loaded: what is free for KV is known behind it."""

    name: str
    model: LlamaForCausalLM
    layout: KVLayout
    max_model_len: int


def load_draft(
    settings: EngineSettings, target: Path, target_config: ModelConfig, max_model_len: int, device: torch.device
) -> Draft | None:
    """Raises UnsupportedModel where its tokens are not the target's."""
    if settings.speculation is None or settings.speculation.model is None:
        return None
    directory = settings.speculation.model
    config = read_model_config(directory)
    if config.vocab_size != target_config.vocab_size:
        raise UnsupportedModel(
            f"the draft model {directory} knows {config.vocab_size} tokens, the model {target_config.vocab_size}"
        )
    if _vocabulary(directory) != _vocabulary(target):
        raise UnsupportedModel(f"the draft model {directory} has another tokenizer than the model")
    longest = min(max_model_len, config.max_position)
    config = config.for_length(longest)
    dtype = choose_dtype(settings.dtype, config, device)
    layout = kv_layout(config, settings.block_size, dtype, settings.kv_cache_dtype)
    check_kv_dtype(layout, dtype, device)
    model = load_model(directory, config, dtype, device)
    return Draft(name=directory.name, model=model, layout=layout, max_model_len=longest)


def bytes_per_block(layout: KVLayout, draft: Draft | None, num_gpus: int = 1) -> int:
    """In both caches, which have as many blocks; of several GPUs, the first alone has the draft's."""
    return layout.bytes_per_block + num_gpus * (draft.layout.bytes_per_block if draft else 0)


def build_speculator(
    config: "SpeculativeConfig | None", draft: Draft | None, scheduler: Scheduler, device: torch.device,
    captures: bool = False,
) -> Speculator | None:  # fmt: skip
    """captures: steps of the draft model are replayed as graphs, where they can be"""
    if config is None:
        return None
    if draft is not None:
        log.info("up to %d tokens are drafted by %s", config.num_speculative_tokens, draft.name)
        return Speculator(_draft_model(draft, scheduler, device, captures), scheduler, config.num_speculative_tokens)
    log.info(
        "up to %d tokens are drafted by looking up the last %d to %d", config.num_speculative_tokens, *config.lookup
    )
    return Speculator(NgramProposer(*config.lookup), scheduler, config.num_speculative_tokens)


def _draft_model(draft: Draft, scheduler: Scheduler, device: torch.device, captures: bool) -> DraftModel:
    limits = replace(scheduler.limits, max_model_len=draft.max_model_len, enable_prefix_caching=True)
    kv_cache = KVCache(draft.layout, limits.num_blocks, device)
    runner = ModelRunner(draft.model, kv_cache, draft.max_model_len)
    runner.warm_up()
    if captures and can_be_captured(draft.model.config, kv_cache.data):
        runner.capture_decodes(limits.max_num_seqs, CudaCapture())
    return DraftModel(runner, limits)


def _vocabulary(directory: Path) -> Any:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    return json.loads(path.read_text())["model"]["vocab"]
