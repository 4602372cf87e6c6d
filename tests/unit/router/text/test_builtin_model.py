"""The built-in model's real tokenizer and template, against transformers' own."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from kvasir.router.text.chat_template import ChatTemplate, find_template
from kvasir.router.text.text_stream import TextRules, TextStream
from kvasir.router.text.tokenizer import TextTokenizer

TEXTS = [
    *("The quick brown fox", "  leading and trailing  ", "1234567890", "tabs\tand\r\nnewlines\n\n\n", ""),
    *("日本語のテキスト、漢字", "👩‍👩‍👧 🇩🇪 👍🏽", "e\u0301 a\u0308 \u200d", "\ufffd\u0000"),
    *("<|im_start|>user\nhi<|im_end|>", "def f(x):\n    return x**2"),
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 👋"}],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": ""}],
]


@pytest.fixture(scope="module")
def ours(model_dir: Path) -> TextTokenizer:
    return TextTokenizer.load(model_dir)


@pytest.fixture(scope="module")
def theirs(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


def streamed(tokenizer: TextTokenizer, token_ids: list[int], skip_special_tokens: bool) -> str:
    stream = TextStream(tokenizer, TextRules(skip_special_tokens=skip_special_tokens))
    return "".join(stream.push([token_id]) for token_id in token_ids) + stream.flush()


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_ids_and_text_are_transformers_own(ours: TextTokenizer, theirs: Any, text: str) -> None:
    token_ids = ours.encode(text, add_special_tokens=False)
    assert token_ids == theirs.encode(text, add_special_tokens=False)
    assert streamed(ours, token_ids, skip_special_tokens=False) == text


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.integers(0, 49151), max_size=40), st.booleans())
def test_any_ids_are_decoded_as_by_transformers(ours: TextTokenizer, theirs: Any, ids: list[int], skip: bool) -> None:
    assert streamed(ours, ids, skip) == theirs.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("chat", CHATS, ids=range(len(CHATS)))
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_the_template_is_rendered_as_by_transformers(
    model_dir: Path, ours: TextTokenizer, theirs: Any, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    source = find_template(model_dir)
    assert source is not None
    text = ChatTemplate(source, ours.special_tokens).render(chat, add_generation_prompt=add_generation_prompt)
    assert text == theirs.apply_chat_template(chat, tokenize=False, add_generation_prompt=add_generation_prompt)


def test_a_stop_string_across_tokens_of_the_real_vocabulary(ours: TextTokenizer) -> None:
    text = "First item.\n\nSecond item is a longer one.\n\nThird"
    for stop, expected in (
        ("\n\n", "First item."),
        (" a", "First item.\n\nSecond item is"),
        ("tem is", "First item.\n\nSecond i"),
    ):
        stream = TextStream(ours, TextRules(stop=(stop,)))
        shown = stream.push(ours.encode(text, add_special_tokens=False)) + stream.flush()
        assert (shown, stream.is_stopped) == (expected, True)
