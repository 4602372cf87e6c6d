"""The KV identity: equal for equal KV, different for any other."""

import json
import os
from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvasir.engine import identity
from kvasir.engine.identity import kv_identity, weights_digest
from kvasir.engine.kv_cache import kv_layout
from kvasir.engine.models import read_model_config
from kvasir.engine.models.config import Experts, ModelConfig
from kvasir.engine.models.packed_checkpoint import Packing
from kvasir.engine.models.rope import RopeConfig
from tests.unit.engine.checkpoints import edit_json, save_checkpoint


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    save_checkpoint(directory)
    return directory


def identity_of(directory: Path, block_size: int = 16, dtype: torch.dtype = torch.float32) -> bytes:
    config = read_model_config(directory)
    return kv_identity(directory, config, kv_layout(config, block_size, dtype))


def change_one_weight(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"][3] += 1e-3
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def test_what_the_kv_depends_on_changes_it(model: Path) -> None:
    first = identity_of(model)
    assert len(first) == 32
    assert identity_of(model) == first
    seen = {first, identity_of(model, block_size=32)}
    edit_json(model / "config.json", rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    seen.add(identity_of(model))
    change_one_weight(model)
    seen.add(identity_of(model))
    assert len(seen) == 4


@pytest.mark.parametrize("name", [field.name for field in fields(ModelConfig)])
def test_every_field_of_the_config_changes_it(model: Path, name: str) -> None:
    config = read_model_config(model)
    value = getattr(config, name)
    experts = Experts(count=2, per_token=1, intermediate_size=8, normalises=True, layers=(0,))
    other = {
        "ropes": (replace(config.ropes[0], rotary_share=0.5),),
        "experts": experts,
        "packing": Packing(method="awq", group_size=128, zeros_are_one_less=False),
        "rope_of_layer": (0, 0, 1),
        "windows": (0, 0, 9),
    }.get(name) or (value + "x" if isinstance(value, str) else not value if isinstance(value, bool) else value + 1)
    layout = kv_layout(config, 16, torch.float32)
    changed = kv_identity(model, replace(config, **{name: other}), layout)
    assert changed != kv_identity(model, config, layout)


@pytest.mark.parametrize("name", [field.name for field in fields(RopeConfig)])
def test_every_field_of_a_rotation_changes_it(model: Path, name: str) -> None:
    config = read_model_config(model)
    value = getattr(config.ropes[0], name)
    other = value + ("x" if isinstance(value, str) else (1.5,) if isinstance(value, tuple) else 1)
    layout = kv_layout(config, 16, torch.float32)
    changed = replace(config, ropes=(replace(config.ropes[0], **{name: other}),))
    assert kv_identity(model, changed, layout) != kv_identity(model, config, layout)


def test_nodes_of_different_dtypes_have_one_identity(model: Path) -> None:
    """So their blocks have the same hashes; each block's header says its own dtype."""
    assert identity_of(model, dtype=torch.bfloat16) == identity_of(model)


def test_names_and_places_of_files_do_not_change_it(model: Path, tmp_path: Path) -> None:
    sharded = tmp_path / "other name"
    save_checkpoint(sharded, shard_size="50KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert identity_of(sharded) == identity_of(model)


def test_the_weights_are_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = weights_digest(model)
    monkeypatch.setattr(identity, "digest_of_tensors", lambda paths: pytest.fail("read again"))
    assert weights_digest(model) == digest


def test_changed_files_are_read_again(model: Path) -> None:
    digest = weights_digest(model)
    change_one_weight(model)
    os.utime(model / "model.safetensors", ns=(1, 1))
    assert weights_digest(model) != digest


def test_without_room_beside_the_model_the_digest_lies_in_the_users_cache(model: Path, tmp_path: Path) -> None:
    (model / "kvasir-weights.json").mkdir()  # nobody, not even root, can write a file there
    digest = weights_digest(model)
    (kept,) = (tmp_path / "cache" / "kvasir" / "digests").iterdir()
    assert json.loads(kept.read_text())["digest"] == digest
    assert not list(model.glob(".*")), "nothing is left lying about"


def test_a_damaged_digest_file_is_made_anew(model: Path) -> None:
    digest = weights_digest(model)
    (model / "kvasir-weights.json").write_text("{")
    assert weights_digest(model) == digest
    assert json.loads((model / "kvasir-weights.json").read_text())["digest"] == digest


def test_the_layout_is_that_of_the_model(model: Path) -> None:
    config = read_model_config(model)
    layout = kv_layout(config, 16, torch.float32)
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (3, 2, 16, "float32")
    assert layout == replace(layout, total_kv_heads=2, first_kv_head=0)
