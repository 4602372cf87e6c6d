"""Every option of the engine, from a YAML file to what the scheduler keeps to; and what a node says at its start."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml

from kvasir.decode_node.config import DecodeConfig
from kvasir.engine.factory import build_engine
from kvasir.node.build import engine_settings
from kvasir.prefill_node.config import PrefillConfig
from tests.unit.engine.checkpoints import save_checkpoint

LIMITS: dict[str, Any] = {
    "block_size": 8,
    "max_num_batched_tokens": 31,
    "max_num_seqs": 7,
    "max_model_len": 48,
    "long_prefill_token_threshold": 19,
    "watermark": 0.125,
    "enable_prefix_caching": False,
    "scheduling_policy": "priority",
    "priority_aging_s": 2.5,
    "max_num_partial_prefills": 3,
    "max_long_partial_prefills": 2,
}
BYTES_OF_A_BLOCK = 2 * 3 * 2 * 8 * 16 * 4  # keys and values, layers, heads, tokens, dimensions, float32


@pytest.mark.parametrize(("kind", "role"), [(DecodeConfig, "decode"), (PrefillConfig, "prefill")])
def test_what_the_file_says_is_what_the_scheduler_keeps_to(
    kind: type[DecodeConfig | PrefillConfig], role: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_checkpoint(tmp_path)
    path = tmp_path / "node.yaml"
    path.write_text(yaml.safe_dump({"model": str(tmp_path), "kv_cache_memory": 13 * BYTES_OF_A_BLOCK, **LIMITS}))
    config = kind.load(["--config", str(path), "--threads", "1", "--listen", "127.0.0.1:0"])
    with caplog.at_level("INFO"):
        engine, kv_cache, _ = build_engine(engine_settings(config, role))
    limits = asdict(engine.scheduler.limits)
    assert {name: limits[name] for name in LIMITS} == LIMITS
    assert (limits["num_blocks"], kv_cache.num_blocks) == (13, 13)
    assert "KV cache of 13 blocks: 104 tokens, 2.17 requests of 48 tokens" in caplog.text
    engine.close()


def test_the_command_line_goes_before_the_file(tmp_path: Path) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("model: /m\nmax_num_seqs: 7\nwatermark: 0.5\n")
    config = DecodeConfig.load(["--config", str(path), "--max-num-seqs", "3"])
    assert (config.max_num_seqs, config.watermark) == (3, 0.5)


def test_a_file_with_a_name_that_is_none_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "node.yaml"
    path.write_text("model: /m\nmax_num_seq: 7\n")
    with pytest.raises(SystemExit):
        DecodeConfig.load(["--config", str(path)])
    assert "max_num_seq" in capsys.readouterr().err
