"""Several choices of one prompt, and what a prompt's own tokens are worth, through real prefill and decode nodes."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kvasir.common.seeds import sequence_seed
from tests.cluster import Cluster
from tests.e2e.asker import CHAT, GREEDY, Asker, ask
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

PROMPT = "The old king of the northern market went to the harbour and counted the boats, one by one,"
HOT = {"temperature": 0.9, "max_tokens": 20, "ignore_eos": True, "return_token_ids": True}
COMPUTED = "kvasir:prompt_tokens_computed_total"


def ids_of(answer: Any) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


def are_all_blocks_free(cluster: Cluster) -> bool:
    found = [node.metrics() for node in (*cluster.prefill, *cluster.decode)]
    return all(metrics["kvasir:free_blocks"] == metrics["kvasir:total_blocks"] for metrics in found)


def test_choices_of_one_prompt_are_computed_once_and_are_what_each_is_alone(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        body = {"prompt": PROMPT, "cache_salt": "several", **HOT}
        with cluster.deltas([*cluster.prefill, *cluster.decode], COMPUTED) as rose:
            several = await asker.whole(**body, seed=11, n=4)
        assert rose[COMPUTED] == several["usage"]["prompt_tokens"]
        assert several["usage"]["completion_tokens"] == 80
        seeds = [sequence_seed(11, index) for index in range(4)]
        alone = await asyncio.gather(*(asker.whole(**body, seed=seed) for seed in seeds))
        assert ids_of(several) == [ids_of(one)[0] for one in alone]
        assert len({tuple(ids) for ids in ids_of(several)}) == 4
        chunks = await asker.chunks(**body, seed=11, n=4)
        for index, ids in enumerate(ids_of(several)):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert [token for choice in mine for token in choice.get("token_ids", [])] == ids
        greedy = await asker.whole(prompt=PROMPT, n=3, max_tokens=8, **GREEDY)
        assert ids_of(greedy)[0] == ids_of(greedy)[1] == ids_of(greedy)[2]

    ask(cluster, script)
    wait_until(lambda: are_all_blocks_free(cluster), 60, "every block came back")


def test_one_choice_may_stop_while_others_go_on(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        body = {"prompt": PROMPT, "seed": 11, "n": 3, **HOT}
        plain = await asker.whole(**body)
        texts = [choice["text"] for choice in plain["choices"]]
        stop = next(text[5:9] for text in texts if sum(text[5:9] in other for other in texts) == 1)
        stopped = await asker.whole(**body, stop=[stop])
        for text, choice in zip(texts, stopped["choices"], strict=True):
            assert choice["text"] == text.split(stop)[0]
            assert choice["finish_reason"] == ("stop" if stop in text else "length")

    ask(cluster, script)


def test_the_best_is_the_most_likely(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        body = {"prompt": PROMPT, "seed": 11, "logprobs": 0, **HOT}
        several = (await asker.whole(**body, n=4))["choices"]
        best = max(several, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]))
        [chosen] = (await asker.whole(**body, best_of=4))["choices"]
        assert chosen["token_ids"] == best["token_ids"]

    ask(cluster, script)


@pytest.fixture(scope="module")
def reference(model_dir: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32).eval()


@torch.inference_mode()
def expected_logprobs(reference: Any, ids: list[int]) -> list[float]:
    """Of each token but the first."""
    logprobs = reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return [float(logprobs[at, token]) for at, token in enumerate(ids[1:])]


def test_a_prompt_is_scored_as_transformers_does(cluster: Cluster, reference: Any) -> None:
    """Cached or not: the prompt has been computed before, and what is in the cache tells no logprobs."""

    async def script(asker: Asker) -> None:
        await asker.whole(prompt=PROMPT * 2, max_tokens=1)
        body = {"prompt": PROMPT * 2, "echo": True, "max_tokens": 0, "logprobs": 1, "return_token_ids": True}
        answer = await asker.whole(**body)
        [choice] = answer["choices"]
        assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == (PROMPT * 2, "length", [])
        assert answer["usage"]["completion_tokens"] == 0
        ids, logprobs = choice["prompt_token_ids"], choice["logprobs"]["token_logprobs"]
        assert logprobs[0] is None
        assert logprobs[1:] == pytest.approx(expected_logprobs(reference, ids), abs=1e-4)
        listed = (await asker.whole(prompt=ids, prompt_logprobs=0, max_tokens=1))["choices"][0]["prompt_logprobs"]
        assert [entry[str(token)]["logprob"] for entry, token in zip(listed[1:], ids[1:], strict=True)] == logprobs[1:]
        messages = [{"role": "user", "content": "Hello"}]
        chat = await asker.whole(CHAT, messages=messages, prompt_logprobs=0, max_tokens=1, return_token_ids=True)
        scored = [entry[str(token)]["logprob"] for entry, token in
                  zip(chat["prompt_logprobs"][1:], chat["prompt_token_ids"][1:], strict=True)]  # fmt: skip
        assert scored == pytest.approx(expected_logprobs(reference, chat["prompt_token_ids"]), abs=1e-4)
        assert (await asker.whole(prompt="A plain one", max_tokens=1))["usage"]["completion_tokens"] == 1

    ask(cluster, script)


def test_logprobs_are_of_the_raw_logits_on_both_nodes(cluster: Cluster, reference: Any) -> None:
    """Bias, penalties and temperature change what is sampled, and not what it was worth."""

    async def script(asker: Asker) -> None:
        rules = {"temperature": 0.7, "repetition_penalty": 1.3, "logit_bias": {"28": 3}, "seed": 4, "max_tokens": 6}
        answer = await asker.whole(prompt=PROMPT, logprobs=2, return_token_ids=True, **rules)
        [choice] = answer["choices"]
        ids = choice["prompt_token_ids"] + choice["token_ids"]
        expected = expected_logprobs(reference, ids)[-len(choice["token_ids"]) :]
        assert choice["logprobs"]["token_logprobs"] == pytest.approx(expected, abs=1e-4)

    ask(cluster, script)


def test_cached_tokens_are_those_that_nobody_computed(cluster: Cluster) -> None:
    async def script(asker: Asker) -> None:
        body = {"prompt": PROMPT * 3, "max_tokens": 4, "cache_salt": "counted"}
        for attempt in range(2):
            with cluster.deltas([*cluster.prefill, *cluster.decode], COMPUTED) as rose:
                usage = (await asker.whole(**body, n=2))["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            assert rose[COMPUTED] == usage["prompt_tokens"] - cached
            assert cached == ((usage["prompt_tokens"] - 1) // 16 * 16 if attempt else 0)

    ask(cluster, script)
