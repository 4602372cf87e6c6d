"""Faults that systems like this one were seen to have, each asked of a real prefill node and decode node."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvasir.engine.factory import build_engine
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from kvasir.router.text.tokenizer import TextTokenizer
from tests.cluster import Cluster
from tests.e2e.asker import CHAT, COMPLETIONS, GREEDY, Asker, ask

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]


def text_of(chunks: Sequence[Any]) -> str:
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


def test_a_cut_chat_stream_has_all_its_keys_and_all_its_text(cluster: Cluster) -> None:
    """Inner chunks once lost their finish_reason and gained empty tool calls; the last text came with the end."""
    body = {"messages": [{"role": "user", "content": "count to 9"}], "max_tokens": 5, "temperature": 0}

    async def script(asker: Asker) -> None:
        whole = await asker.whole(CHAT, **body)
        chunks = await asker.chunks(CHAT, **body)
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        assert all("choices" in chunk and chunk["choices"] for chunk in chunks), "usage was not asked for"
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
        assert all("tool_calls" not in choice["delta"] for choice in choices)
        assert text_of(chunks) == whole["choices"][0]["message"]["content"] != ""
        with_usage = await asker.chunks(CHAT, **body, stream_options={"include_usage": True})
        assert with_usage[-1]["choices"] == []
        for count in ("prompt_tokens", "completion_tokens", "total_tokens"):
            assert with_usage[-1]["usage"][count] == whole["usage"][count]
        assert whole["usage"]["completion_tokens"] == 5

    ask(cluster, script)


def test_stop_strings_end_at_the_first_match_in_the_text(cluster: Cluster) -> None:
    """Matched by token ids, they were missed; released from holding, their beginnings were sent twice or too early."""
    body = {"prompt": "Alice: Hi, Bob!\nBob: Hi,", "max_tokens": 40, "temperature": 0, "ignore_eos": True}

    async def script(asker: Asker) -> None:
        plain = (await asker.whole(**body, logprobs=0))["choices"][0]
        text, offsets = plain["text"], plain["logprobs"]["text_offset"]
        assert len(offsets) == 40
        middle = next(i for i in range(8, 40) if offsets[i] + 2 < offsets[i + 1])  # a token of three characters or more
        inside = text[offsets[middle] + 1 : offsets[middle + 1] + 1]  # begins in one token and ends in another
        for stops in (
            [inside],
            [text[3:9], inside],
            [inside, inside[:-1] + "\x00", inside[1:], text[-4:]],
            [text[offsets[20] : offsets[20] + 1]],
        ):
            end = min(text.index(stop) + len(stop) for stop in stops if stop in text)
            length = max(len(stop) for stop in stops if text[:end].endswith(stop))
            whole = await asker.whole(**body, stop=stops)
            assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == (text[: end - length], "stop")
            num_generated = sum(offset < end for offset in offsets)
            assert whole["usage"]["completion_tokens"] == num_generated, stops
            assert text_of(await asker.chunks(**body, stop=stops)) == text[: end - length]
        never = text[-3:] + "\x00"  # its beginning is being held back when the limit comes
        assert text_of(await asker.chunks(**body, stop=[never])) == text

    ask(cluster, script)


def test_the_end_marker_of_a_chat_is_a_stop_string(cluster: Cluster) -> None:
    """Specials were stripped before the match, so that it was never seen."""
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": messages, "max_tokens": 30, "temperature": 0, "ignore_eos": True, "stop": ["<|im_end|>"]}
    choice = ask(cluster, lambda asker: asker.whole(CHAT, **body))["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("The capital of France is Paris.", "stop")


def test_hot_samples_are_valid_text(cluster: Cluster, model_dir: Path) -> None:
    """Tokens that are no whole characters once ended the server's process, or stalled the stream."""
    tokenizer = TextTokenizer.load(model_dir)
    body = {"prompt": "emoji: 👩‍👩‍👧 🇩🇪, 日本", "temperature": 1.5, "top_k": 100, "max_tokens": 16, "ignore_eos": True}

    async def script(asker: Asker) -> None:
        seats = asyncio.Semaphore(16)

        async def one(seed: int) -> None:
            async with seats:
                chunks = await asker.chunks(**body, seed=seed, return_token_ids=True, skip_special_tokens=False)
            ids = [i for chunk in chunks for i in chunk["choices"][0].get("token_ids", [])]
            assert len(ids) == 16
            assert text_of(chunks) == tokenizer.decode(ids)

        await asyncio.gather(*(one(seed) for seed in range(50)))

    ask(cluster, script)


def test_a_seeded_request_among_clients_that_leave(cluster: Cluster) -> None:
    body = {"prompt": "Once upon a time", "temperature": 0.8, "max_tokens": 24, "ignore_eos": True}

    async def script(asker: Asker) -> None:
        async def seeded() -> Any:
            return (await asker.whole(**body, seed=42, return_token_ids=True))["choices"][0]["token_ids"]

        alone = await seeded()
        leaving = [asker.leave(**{**body, "max_tokens": 500}, stream=True) for _ in range(7)]
        among_others, *_ = await asyncio.gather(seeded(), *leaving)
        assert among_others == alone

    ask(cluster, script)


def test_bias_bans_and_forces_on_both_nodes(cluster: Cluster) -> None:
    prompt = "The quick brown fox"

    async def script(asker: Asker) -> None:
        plain = await asker.ids(prompt, max_tokens=6)
        assert await asker.ids(prompt, max_tokens=6, logit_bias={}) == plain
        banned = await asker.ids(prompt, max_tokens=6, logit_bias={str(token): -100 for token in plain})
        assert not set(banned) & set(plain)
        assert await asker.ids(prompt, max_tokens=6, logit_bias={"5000": 100}) == [5000] * 6
        assert await asker.ids(prompt, max_tokens=6) == plain

    ask(cluster, script)


COLOURS = "red blue red blue red blue red"  # a model that likes to go on with blue
PENALTIES: list[dict[str, Any]] = [
    {},
    {"presence_penalty": 2.0},
    {"frequency_penalty": 2.0},
    {"repetition_penalty": 2.0},
]


def test_penalties_know_prompt_from_output_on_both_nodes(cluster: Cluster, model_dir: Path) -> None:
    """Mixed up where the two meet: the first token comes from the prefill node, the next from the decode node."""

    async def script(asker: Asker) -> list[list[int]]:
        alone = [await asker.ids(COLOURS, max_tokens=8, ignore_eos=True, **penalty) for penalty in PENALTIES]
        for order in (PENALTIES, PENALTIES[::-1]):  # the place in the batch once mattered
            batch = await asyncio.gather(
                *(asker.ids(COLOURS, max_tokens=8, ignore_eos=True, **penalty) for penalty in order)
            )
            assert (batch if order is PENALTIES else batch[::-1]) == alone
        return alone

    plain, presence, frequency, repetition = ask(cluster, script)
    assert plain[0] == presence[0] == frequency[0], "nothing has been output yet"
    assert repetition[0] != plain[0], "the prompt counts"
    assert [plain, presence, frequency, repetition] == in_one_process(model_dir)


def in_one_process(model_dir: Path) -> list[list[int]]:
    """The same by an engine of our own, which prefills and decodes."""
    settings = EngineSettings(model=str(model_dir), num_threads=1, max_model_len=512, kv_cache_memory=32 << 20)
    engine, _, _ = build_engine(settings)
    prompt = TextTokenizer.load(model_dir).encode(COLOURS, add_special_tokens=True)
    requests = [
        Request(
            request_id=RequestId(str(i)),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=8, **penalty),
        )
        for i, penalty in enumerate(PENALTIES)
    ]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
    return [request.output_token_ids for request in requests]


def test_the_same_prompt_again_and_again(cluster: Cluster, model_dir: Path) -> None:
    """A whole-prompt hit once ran the last token again, on top of a cache that held it already."""
    ids = TextTokenizer.load(model_dir).encode(
        "A long list of words: " + "one two three " * 40, add_special_tokens=True
    )

    async def script(asker: Asker) -> None:
        for length in (47, 48, 49):
            body = {"prompt": ids[:length], "max_tokens": 8, "cache_salt": f"again {length}", "logprobs": 1, **GREEDY}
            first, *others = [await asker.whole(**body) for _ in range(3)]
            for again in others:
                assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
                expected = pytest.approx(first["choices"][0]["logprobs"]["token_logprobs"], abs=1e-3)
                assert again["choices"][0]["logprobs"]["token_logprobs"] == expected
                cached = again["usage"]["prompt_tokens_details"]["cached_tokens"]
                assert cached == (length - 1) // 16 * 16 < again["usage"]["prompt_tokens"] == length

    ask(cluster, script)


@pytest.mark.parametrize("stream", [False, True])
def test_a_length_beyond_the_model_is_an_error_with_a_body(cluster: Cluster, stream: bool) -> None:
    body = {"model": cluster.model, "prompt": "hello", "max_tokens": 10**6, "stream": stream}
    response = httpx.post(f"{cluster.url}{COMPLETIONS}", json=body, timeout=60)
    assert (response.status_code, response.headers["content-type"]) == (400, "application/json")
    assert response.json()["error"]["code"] == "context_length_exceeded"


def test_large_bodies_are_read_and_larger_ones_refused_by_name(cluster: Cluster) -> None:
    """Defaults of HTTP and gRPC libraries, of 32 KiB to 4 MiB, were never raised."""
    body = {"model": cluster.model, "prompt": "hello", "max_tokens": 1}
    with httpx.Client(base_url=cluster.url, timeout=60) as client:
        for num_bytes in (1 << 20, 3 << 20, 5 << 20, 20 << 20):
            assert client.post(COMPLETIONS, json={**body, "user": "x" * num_bytes}).status_code == 200
        refused = client.post(COMPLETIONS, json={**body, "user": "x" * (33 << 20)})
        assert refused.status_code == 413
        assert str(32 << 20) in refused.json()["error"]["message"]


@pytest.mark.parametrize("eos", [0, 2])
def test_every_end_of_sequence_token_ends_on_both_nodes(cluster: Cluster, eos: int) -> None:
    """Ends named in one file and not in another were run over: generation went on to the limit."""
    body = {"prompt": "Hello", "max_tokens": 8, "logit_bias": {str(eos): 100}, **GREEDY}

    async def script(asker: Asker) -> None:
        at_once = await asker.whole(**body)
        later = await asker.whole(**body, min_tokens=3)  # the fourth: the first comes from the prefill node
        for answer, num_tokens in ((at_once, 1), (later, 4)):
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert answer["choices"][0]["token_ids"][-1] == eos
            assert "<|" not in answer["choices"][0]["text"]
            assert answer["usage"]["completion_tokens"] == num_tokens
        assert at_once["choices"][0]["text"] == ""
        ignored = await asker.whole(**body, ignore_eos=True)
        assert ignored["choices"][0]["token_ids"] == [eos] * 8
        assert (ignored["choices"][0]["finish_reason"], ignored["choices"][0]["text"]) == ("length", "")

    ask(cluster, script)
