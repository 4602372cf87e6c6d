"""The built-in model itself: how it cuts text, what it is told to be, and what it answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


TRICKY = {
    # Digits stand alone, so the blanks before them stay together. A tokenizer without that rule says x, _, _, 3.
    "x  3": ["x", "ĠĠ", "3"],
    "\n\n  42": ["ĊĊĠĠ", "4", "2"],
    "½ of 3²": ["Â½", "Ġof", "Ġ", "3", "Â²"],
    "<|im_start|>user\nhi<|im_end|>": ["<|im_start|>", "user", "Ċ", "hi", "<|im_end|>"],
}


@pytest.mark.parametrize("text", TRICKY)
def test_tricky_text_is_cut_as_the_model_was_trained(model_dir: Path, tokenizer: Any, text: str) -> None:
    encoding = Tokenizer.from_file(str(model_dir / "tokenizer.json")).encode(text)
    assert encoding.tokens == TRICKY[text]
    assert tokenizer(text).input_ids == encoding.ids


@pytest.mark.parametrize("text", [*TRICKY, "naïve 🦄🏳️‍🌈", "日本語、한국어 ２", "  a\t\r\n b ", "", "Привет"])
def test_decoding_gives_the_text_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_the_tokenizer_knows_its_specials_and_limits(tokenizer: Any) -> None:
    assert sorted(tokenizer.all_special_ids) == list(range(17))
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.model_max_length == 8192
    assert len(tokenizer) == 49152


def test_the_config_says_what_was_meant(model_dir: Path) -> None:
    config = json.loads((model_dir / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["rms_norm_eps"] == 1e-5
    assert config["rope_theta"] == 100_000.0
    assert config["tie_word_embeddings"] is True
    assert json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"] == [2, 0]


@pytest.fixture(scope="module")
def llama(model_dir: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(model_dir)


@pytest.mark.parity
def test_the_model_answers_and_stops(tokenizer: Any, llama: Any) -> None:
    assert llama.dtype == torch.float32
    assert llama.config.rms_norm_eps == 1e-5
    assert llama.config.rope_parameters["rope_theta"] == 100_000.0
    question = [{"role": "user", "content": "What is the capital of France?"}]
    chat = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = llama.generate(**chat, max_new_tokens=32, do_sample=False)
    answer = tokenizer.decode(output[0, chat["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"


@pytest.mark.parity
def test_plain_english_does_not_surprise_the_model(tokenizer: Any, llama: Any) -> None:
    """9.4 when all is well; 15 with the K of a single layer left in llama.cpp's order, 64 with all Q and K."""
    text = (
        "The sun rises in the east and sets in the west. Water boils at one hundred degrees Celsius at sea level, "
        "and freezes at zero. There are seven days in a week and twelve months in a year."
    )
    tokens = tokenizer(text, return_tensors="pt").input_ids
    with torch.inference_mode():
        assert llama(tokens, labels=tokens).loss.exp().item() < 12
