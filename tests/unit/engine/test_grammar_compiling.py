"""Grammars are compiled beside the engine, which does not wait for them."""

import asyncio
import threading

import pytest

from kvasir.common.errors import InvalidRequest
from kvasir.common.grammar import Grammar
from kvasir.engine.async_engine import AsyncEngine
from kvasir.engine.engine import Engine
from kvasir.engine.grammar import Compiled, Grammars
from kvasir.engine.request import FinishReason, RequestId
from kvasir.engine.step import StepResult
from tests.unit.engine.grammar_world import PERSON, Vocabulary, new_engine, note, regex

DEADLINE_S = 60


class SlowGrammars(Grammars):
    """Compiles when it is told to."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        super().__init__(vocabulary.path, vocabulary.size, {vocabulary.eos})
        self.gate = threading.Event()
        self.entered = threading.Event()

    def compiled(self, grammar: Grammar) -> Compiled:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        return super().compiled(grammar)


class Bench:
    """A started engine."""

    def __init__(self, vocabulary: Vocabulary, grammars: Grammars | None) -> None:
        inner = new_engine(vocabulary)
        inner.grammars = grammars
        self.engine = AsyncEngine(inner, on_result=self._on_result, on_crash=self._on_crash)
        self.ends: dict[str, FinishReason | str] = {}
        self.num_outputs = 0
        self._news = asyncio.Event()

    def _on_result(self, result: StepResult) -> None:
        note(result, self.ends)
        self.num_outputs += len(result.outputs)
        self._news.set()

    def _on_crash(self, error: Exception) -> None:
        self.ends["crash"] = repr(error)
        self._news.set()

    async def ended(self, *names: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not set(names) <= self.ends.keys():
                assert "crash" not in self.ends, self.ends
                self._news.clear()
                await self._news.wait()


async def test_the_batch_runs_on_while_a_grammar_compiles(vocabulary: Vocabulary) -> None:
    grammars = SlowGrammars(vocabulary)
    bench = Bench(vocabulary, grammars)
    await bench.engine.start()
    constrained, free = vocabulary.request("constrained", PERSON), vocabulary.request("free", None, max_tokens=50)
    bench.engine.submit(constrained)
    await asyncio.to_thread(grammars.entered.wait, DEADLINE_S)
    bench.engine.submit(free)
    await bench.ended("free")
    assert constrained.output_token_ids == []
    async with asyncio.timeout(DEADLINE_S):
        while bench.engine.age_s > 0:  # an engine that waits for a compiler alone is idle, not stuck
            await asyncio.sleep(0.001)
    grammars.gate.set()
    await bench.ended("constrained")
    assert bench.ends["constrained"] is FinishReason.STOP
    await bench.engine.close()


@pytest.mark.parametrize("num_forks", [0, 2])
async def test_a_grammar_that_does_not_compile_fails_its_request_alone(vocabulary: Vocabulary, num_forks: int) -> None:
    grammars = SlowGrammars(vocabulary)
    bench = Bench(vocabulary, grammars)
    await bench.engine.start()
    request = vocabulary.request("bad", regex("(["))
    request.awaits.add("blocks")  # a transfer may be writing into its blocks: they stay until it has ended
    for index in range(num_forks):
        request.forks.append(vocabulary.request(f"bad-{index}", regex("([")))
    bench.engine.submit(request)
    async with asyncio.timeout(DEADLINE_S):
        while not await bench.engine.call(lambda engine: len(engine.scheduler.loading)):
            await asyncio.sleep(0.001)
    grammars.gate.set()
    bench.engine.submit(vocabulary.request("good", PERSON))
    names = ["bad", *(f"bad-{index}" for index in range(num_forks))]
    await bench.ended("good", *names)
    assert all("unclosed" in str(bench.ends[name]) for name in names)
    assert await bench.engine.call(lambda engine: len(engine.scheduler.requests)) == 1
    bench.engine.loading_done(request.request_id)
    assert await bench.engine.call(lambda engine: len(engine.scheduler.requests)) == 0
    assert await bench.engine.call(Engine.check_invariants) is None
    await bench.engine.close()


async def test_a_request_that_is_cancelled_while_its_grammar_compiles(vocabulary: Vocabulary) -> None:
    grammars = SlowGrammars(vocabulary)
    bench = Bench(vocabulary, grammars)
    await bench.engine.start()
    bench.engine.submit(vocabulary.request("r", PERSON))
    await asyncio.to_thread(grammars.entered.wait, DEADLINE_S)
    bench.engine.cancel(RequestId("r"))
    assert await bench.engine.call(lambda engine: len(engine.scheduler.requests)) == 0
    grammars.gate.set()
    bench.engine.submit(vocabulary.request("next", PERSON))
    await bench.ended("next")
    assert list(bench.ends) == ["next"]
    await bench.engine.close()


async def test_a_node_without_grammars_refuses_at_once(vocabulary: Vocabulary) -> None:
    bench = Bench(vocabulary, None)
    await bench.engine.start()
    with pytest.raises(InvalidRequest, match="grammar"):
        bench.engine.submit(vocabulary.request("r", PERSON))
    await bench.engine.close()


def test_tokens_to_be_computed_are_queued_while_the_grammar_compiles(vocabulary: Vocabulary) -> None:
    engine = new_engine(vocabulary)
    request = vocabulary.request("r", PERSON)
    engine.submit(request)
    engine.step()
    assert engine.stats().num_queued_tokens == request.num_tokens
