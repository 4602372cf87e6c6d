"""A Gemma 3 in a GGUF file: what comes out of it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter, TokenType
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from kvasir.cli.gguf_fields import _TENSOR_NAMES
from kvasir.cli.gguf_gemma3 import _LAYER_TENSOR_NAMES
from kvasir.cli.model import main
from kvasir.router.text.tokenizer import TextTokenizer

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 48, 64, 4, 1, 32, 2

# A token may be joined of its parts only if these are tokens; of two that could be joined, the higher score wins.
PIECES: list[tuple[str, float, TokenType]] = [
    ("<pad>", 0, TokenType.CONTROL),
    ("<eos>", 0, TokenType.CONTROL),
    ("<bos>", 0, TokenType.CONTROL),
    ("<unk>", 0, TokenType.CONTROL),
    ("<end_of_turn>", 0, TokenType.CONTROL),
    ("\n\n", 0, TokenType.USER_DEFINED),
    ("  ", 0, TokenType.USER_DEFINED),
    *((f"<0x{byte:02X}>", 0.0, TokenType.BYTE) for byte in range(256)),
    ("ab", -1, TokenType.NORMAL),
    ("bc", 0, TokenType.NORMAL),  # before "ab", though it comes later in a text
    ("▁a", -3, TokenType.NORMAL),
    ("▁ab", -2, TokenType.NORMAL),
    *((char, -10.0 - i, TokenType.NORMAL) for i, char in enumerate("abc▁\n")),
]


def checkpoint_weights() -> dict[str, NDArray[np.float32]]:
    """As transformers would have it."""
    rng = np.random.default_rng(3)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (len(PIECES), HIDDEN), "model.norm": (HIDDEN,)}
    of_layer: dict[str, tuple[int, ...]] = {
        "input_layernorm": (HIDDEN,),
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
        "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.q_norm": (HEAD_DIM,),
        "self_attn.k_norm": (HEAD_DIM,),
        "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "post_attention_layernorm": (HIDDEN,),
        "pre_feedforward_layernorm": (HIDDEN,),
        "mlp.gate_proj": (FEED_FORWARD, HIDDEN),
        "mlp.up_proj": (FEED_FORWARD, HIDDEN),
        "mlp.down_proj": (HIDDEN, FEED_FORWARD),
        "post_feedforward_layernorm": (HIDDEN,),
    }
    shapes |= {f"model.layers.{i}.{name}": shape for i in range(LAYERS) for name, shape in of_layer.items()}
    return {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    """model.layers.1.mlp.up_proj.weight  ->  blk.1.ffn_up.weight"""
    name = name.removesuffix(".weight")
    if not name.startswith("model.layers."):
        return {full: short for short, full in _TENSOR_NAMES.items()}[name] + ".weight"
    _, _, layer, part = name.split(".", 3)
    return f"blk.{layer}.{ {full: short for short, full in _LAYER_TENSOR_NAMES.items()}[part] }.weight"


def write_gguf(path: Path, edit: Callable[[GGUFWriter], None] = lambda writer: None) -> Path:
    writer = GGUFWriter(path, "gemma3")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1_000_000.0)
    writer.add_sliding_window(16)
    writer.add_tokenizer_model("llama")
    writer.add_token_list([piece for piece, _, _ in PIECES])
    writer.add_token_scores([float(score) for _, score, _ in PIECES])
    writer.add_token_types([kind for _, _, kind in PIECES])
    writer.add_pad_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_bos_token_id(2)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages }}")
    for name, weight in checkpoint_weights().items():
        writer.add_tensor(gguf_name(name), weight + 1 if name.endswith("norm.weight") else weight)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("gemma")
    assert main(["convert", str(write_gguf(directory / "tiny.gguf")), str(directory / "model")]) == 0
    return directory / "model"


def test_every_weight_arrives(converted: Path) -> None:
    weights, expected = load_file(converted / "model.safetensors"), checkpoint_weights()
    assert weights.keys() == expected.keys()
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], weight, atol=3e-7, rtol=0)


def test_the_config_says_what_was_meant(converted: Path) -> None:
    config = json.loads((converted / "config.json").read_text())
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert (config["rms_norm_eps"], config["rope_theta"], config["rope_local_base_freq"]) == (1e-6, 1e6, 1e4)
    assert (config["head_dim"], config["query_pre_attn_scalar"], config["sliding_window"]) == (32, 32, 16)
    assert json.loads((converted / "generation_config.json").read_text())["eos_token_id"] == [1, 4]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("abc", ["a", "bc"]),
        ("ab", ["ab"]),
        (" ab", ["▁ab"]),
        (" abc", ["▁a", "bc"]),
        ("a   b", ["a", "▁▁", "▁", "b"]),
        ("a\n\n\nb", ["a", "\n\n", "\n", "b"]),
        ("é\t", ["<0xC3>", "<0xA9>", "<0x09>"]),
        ("a<eos>b<end_of_turn>", ["a", "<eos>", "b", "<end_of_turn>"]),
        ("", []),
    ],
)
def test_text_is_cut_as_sentencepiece_cuts_it(converted: Path, text: str, tokens: list[str]) -> None:
    encoding = Tokenizer.from_file(str(converted / "tokenizer.json")).encode(text)
    assert encoding.tokens == ["<bos>", *tokens]
    tokenizer = TextTokenizer.load(converted)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [2, *ids] == encoding.ids
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda writer: writer.add_tensor("output.weight", np.zeros((2, 2), np.float32)), "output.weight"),
        (lambda writer: writer.add_float32("gemma3.rope.scaling.factor", 8.0), "gemma3.rope.scaling.factor"),
    ],
)
def test_what_is_unknown_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], edit: Callable[[GGUFWriter], None], named: str
) -> None:
    gguf = write_gguf(tmp_path / "tiny.gguf", edit)
    assert main(["convert", str(gguf), str(tmp_path / "model")]) == 1
    assert named in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_what_is_no_gguf_or_in_the_way_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_bytes(b"no such thing, by far")
    assert main(["convert", str(tmp_path / "file"), str(tmp_path / "model")]) == 1
    assert "cannot be converted" in capsys.readouterr().err
    assert main(["convert", str(tmp_path / "file"), str(tmp_path / "file")]) == 1
    assert "exists already" in capsys.readouterr().err
