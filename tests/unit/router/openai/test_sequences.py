"""Several choices of one prompt: one generation, read apart; and the best of them."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvasir.common.seeds import sequence_seed
from kvasir.router.openai.best_of import best_choices
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.types import PositionLogprobs, RoutedRequest, TokenDelta
from tests.fake_dispatcher import Step, play
from tests.unit.router.openai.conftest import END, ids, running_router
from tests.unit.router.openai.test_shapes import events

SEED = 7


def number_of(request: RoutedRequest) -> int:
    """Which sequence it is, by its seed."""
    return next(number for number in range(128) if request.sampling.seed == sequence_seed(SEED, number))


def texts(*each: str, **options: Any) -> Any:
    """Sequence i says the i-th text, token by token, and then the end token."""
    return lambda request: play([*ids(each[number_of(request)]), END], request, **options)


async def test_each_choice_has_its_own_text_and_end() -> None:
    async with running_router(texts("one", "two words", "3", num_cached_tokens=1)) as router:
        body = {"n": 3, "seed": SEED, "max_tokens": 30}
        answer = (await router.complete(**body)).json()
        expected = [(0, "one", "stop"), (1, "two words", "stop"), (2, "3", "stop")]
        assert [(one["index"], one["text"], one["finish_reason"]) for one in answer["choices"]] == expected
        assert answer["usage"]["completion_tokens"] == sum(len(ids(text)) + 1 for _, text, _ in expected)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1, "of the prompt, which is one"
        chunks = events(await router.complete(**body, stream=True))
        choices = [chunk["choices"][0] for chunk in chunks]
        for index, text, reason in expected:
            assert "".join(one["text"] for one in choices if one["index"] == index) == text
            reasons = [one["finish_reason"] for one in choices if one["index"] == index and one["finish_reason"]]
            assert reasons == [reason]
        assert [request.num_sequences for request in router.dispatcher.requests] == [3, 3]
        assert (router.dispatcher.num_closed_early, router.dispatcher.stopped) == (0, [])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_choice_and_no_other(stream: bool) -> None:
    async with running_router(texts("aaaa bbbb cccc", "aaaa cccc bbbb", "aaaa aaaa aaaa")) as router:
        response = await router.complete(n=3, seed=SEED, max_tokens=50, stop=["bbb"], stream=stream)
        if stream:
            parts = [chunk["choices"][0] for chunk in events(response)]
            found = ["".join(part["text"] for part in parts if part["index"] == index) for index in range(3)]
        else:
            found = [choice["text"] for choice in response.json()["choices"]]
        assert found == ["aaaa ", "aaaa cccc ", "aaaa aaaa aaaa"]
        assert router.dispatcher.stopped == [0, 1], "the third comes to its own end"


async def test_when_all_have_met_their_stop_string_the_generation_is_closed() -> None:
    async with running_router(texts("a!" + "b" * 90, "ab!" + "b" * 90)) as router:
        answer = (await router.complete(n=2, seed=SEED, max_tokens=99, stop="!")).json()
        assert [choice["text"] for choice in answer["choices"]] == ["a", "ab"]
        assert (router.dispatcher.num_closed_early, router.dispatcher.stopped) == (1, [0])


async def test_chat_choices_open_in_their_order_whichever_speaks_first() -> None:
    """The official client's stream helper raised an IndexError where choice 2 came before choice 0."""

    def script(request: RoutedRequest) -> list[Step]:
        number = number_of(request)
        rest: list[Step] = [0.001] * (2 - number)  # the last is the first to speak
        return [*rest, *play([*ids("abc"[number]), END], request)]

    async with running_router(script) as router:
        messages: Any = [{"role": "user", "content": "hi"}]
        helper = router.openai.chat.completions.stream(model="m", messages=messages, n=3, seed=SEED)
        async with helper as stream:
            choices = [told.chunk.choices[0] async for told in stream if told.type == "chunk"]
            answer = await stream.get_final_completion()
        assert [choice.index for choice in choices if choice.delta.role] == [0, 1, 2]
        assert [choice.index for choice in choices if choice.delta.content] == [2, 1, 0]
        assert [choice.message.content for choice in answer.choices] == ["a", "b", "c"]


def scored(*logprobs: Sequence[float]) -> Any:
    """Sequence i says the letter i, with these logprobs."""

    def script(request: RoutedRequest) -> list[Step]:
        number = number_of(request)
        token = ids("abcdef"[number])[0]
        deltas: list[Step] = [
            TokenDelta(sequence=0, token_ids=(token,), logprobs=(PositionLogprobs(((token, logprob),), 1),))
            for logprob in logprobs[number]
        ]
        assert request.sampling.logprobs == 0, "wanted to choose by, though not asked for"
        return [*deltas, TokenDelta(sequence=0, token_ids=(), finish_reason="length")]

    return script


async def test_the_best_are_those_with_the_highest_logprob_a_token() -> None:
    """Not in sum: that would favour short ones."""
    script = scored([-3.0], [-1.0, -1.0, -2.5], [-2.0, -2.0], [-1.0, -1.0, -1.0, -1.0])
    async with running_router(script) as router:
        answer = (await router.complete(n=2, best_of=4, seed=SEED)).json()
        assert [(one["index"], one["text"], one["logprobs"]) for one in answer["choices"]] == [
            (0, "dddd", None),
            (1, "bbb", None),
        ]
        assert answer["usage"]["completion_tokens"] == 10, "what was generated was paid for"
        assert [request.num_sequences for request in router.dispatcher.requests] == [4]
        answer = (await router.complete(prompt=["x", "y"], best_of=4, seed=SEED)).json()
        assert [(one["index"], one["text"]) for one in answer["choices"]] == [(0, "dddd"), (1, "dddd")]


async def test_a_best_of_that_chooses_nothing_may_be_streamed() -> None:
    async with running_router(texts("one", "two")) as router:
        for best_of in (1, 2):
            chunks = events(await router.complete(n=2, best_of=best_of, seed=SEED, stream=True))
            assert {chunk["choices"][0]["index"] for chunk in chunks} == {0, 1}


def test_among_equals_the_first_is_the_best() -> None:
    delta = ChoiceDelta(index=0, text="", token_ids=(), logprobs=(), finish_reason="stop", num_cached_tokens=None)
    sequences = {index: [delta] for index in range(4)}
    assert [best_choices(sequences, 2, 1)[index] is sequences[2 * index] for index in range(2)] == [True, True]
