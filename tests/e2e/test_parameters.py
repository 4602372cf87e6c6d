"""What each sampling and text parameter does, through both nodes: the first token comes from the prefill node."""

import pytest

from tests.cluster import Cluster
from tests.e2e.asker import CHAT, GREEDY, Asker, ask

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPT = "The quick brown fox jumps over the lazy dog and"
LONG = {"max_tokens": 8, "ignore_eos": True}


def test_what_narrows_the_choice_holds_for_every_token(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        plain = await asker.ids(PROMPT, **LONG)
        hot = {"prompt": PROMPT, "temperature": 2, "seed": 1, "return_token_ids": True, **LONG}
        for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1}):
            assert (await asker.whole(**hot, **narrow))["choices"][0]["token_ids"] == plain, narrow
        assert (await asker.whole(**hot))["choices"][0]["token_ids"] != plain
        allowed = sorted(set(plain[:1]) | {500, 600, 700})
        only = await asker.whole(**hot, allowed_token_ids=allowed)
        assert set(only["choices"][0]["token_ids"]) <= set(allowed)
        tokens = [(await asker.whole(prompt=PROMPT, logprobs=0, temperature=0, **LONG))["choices"][0]["logprobs"]]
        words = [token for token in tokens[0]["tokens"] if token.strip().isalpha()]
        without = await asker.whole(prompt=PROMPT, temperature=0, bad_words=words, **LONG, logprobs=0)
        assert not set(without["choices"][0]["logprobs"]["tokens"]) & set(words)
        assert (await asker.ids(PROMPT, stop_token_ids=[plain[0]], **LONG)) == plain[:1]
        assert (await asker.ids(PROMPT, stop_token_ids=[plain[1]], **LONG)) == plain[:2]

    ask(cluster, script)


def test_min_tokens_hold_back_every_way_to_stop(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
        plain = (await asker.whole(**body))["choices"][0]
        text, offsets = plain["text"], plain["logprobs"]["text_offset"]
        stop = text[:3]  # met in the first token or two
        assert (await asker.whole(**body, stop=[stop]))["choices"][0]["text"] == ""
        later = (await asker.whole(**body, stop=[stop], min_tokens=6))["choices"][0]
        assert later["text"].startswith(text[: offsets[6]])
        shown = (await asker.whole(**body, stop=[stop], include_stop_str_in_output=True))["choices"][0]
        assert (shown["text"], shown["finish_reason"]) == (stop, "stop")
        eos = {"logit_bias": {"2": 100}, "max_tokens": 6, "prompt": PROMPT, "return_token_ids": True, "temperature": 0}
        held = (await asker.whole(**eos, min_tokens=3))["choices"][0]["token_ids"]
        assert (len(held), held[-1], 2 in held[:-1]) == (4, 2, False)

    ask(cluster, script)


def test_special_tokens_usage_and_ids_are_shown_as_asked(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        body = {"prompt": PROMPT, "max_tokens": 3, "logit_bias": {"2": 100}, "ignore_eos": True, **GREEDY}
        assert (await asker.whole(**body))["choices"][0]["text"] == ""
        shown = (await asker.whole(**body, skip_special_tokens=False))["choices"][0]
        assert (shown["text"], shown["token_ids"]) == ("<|im_end|>" * 3, [2, 2, 2])
        options = {"include_usage": True, "continuous_usage_stats": True}
        chunks = await asker.chunks(prompt=PROMPT, temperature=0, stream_options=options, **LONG)
        counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
        assert (counts, counts[0], counts[-1]) == (sorted(counts), 1, 8)
        assert len({chunk["usage"]["prompt_tokens"] for chunk in chunks}) == 1

    ask(cluster, script)


def test_logprobs_of_a_chat_are_alike_from_both_nodes(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        messages = [{"role": "user", "content": "Say hello"}]
        answer = await asker.whole(CHAT, messages=messages, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3)
        content = answer["choices"][0]["logprobs"]["content"]
        assert len(content) == answer["usage"]["completion_tokens"]
        for entry in content:
            values = [best["logprob"] for best in entry["top_logprobs"]]
            assert values == sorted(values, reverse=True)
            assert (len(values), entry["logprob"]) == (3, values[0]), "greedy takes the best"
            assert bytes(entry["bytes"]).decode() == entry["token"]

    ask(cluster, script)


def test_what_changes_nothing_is_accepted_and_what_nobody_knows_is_counted(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        body = {"prompt": PROMPT, "temperature": 0, **LONG}
        plain = (await asker.whole(**body))["choices"]
        harmless = {"user": "me", "metadata": {"a": "b"}, "store": True, "service_tier": "auto", "priority": 1}
        with cluster.deltas([cluster.router], "kvasir:router_unknown_fields_total") as rose:
            assert (await asker.whole(**body, **harmless))["choices"] == plain
            assert (await asker.whole(**body, nobody_knows=1, this_one=[{}]))["choices"] == plain
        assert rose["kvasir:router_unknown_fields_total"] == 2

    ask(cluster, script)
