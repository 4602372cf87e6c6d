"""One thread owns the engine; the event loop only posts and is told."""

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from kvasir.common.errors import EngineDead, InvalidRequest
from kvasir.engine.async_engine import AsyncEngine
from kvasir.engine.engine import Engine
from kvasir.engine.limits import Limits
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.scheduler import Scheduler
from kvasir.engine.step import Sampled, StepPlan, StepResult
from tests.fakes import FakeModelRunner

DEADLINE_S = 60


class GatedRunner(FakeModelRunner):
    """Waits before each forward pass while the gate is shut; throws once it is told to."""

    def __init__(self) -> None:
        super().__init__(num_blocks=16, block_size=4)
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()
        self.error: BaseException | None = None

    def execute(self, plan: StepPlan) -> dict[RequestId, Sampled]:
        self.entered.set()
        assert self.gate.wait(DEADLINE_S)
        if self.error is not None:
            raise self.error
        return super().execute(plan)


class Bench:
    """A started engine, and all that it has said."""

    def __init__(self) -> None:
        self.runner = GatedRunner()
        limits = Limits(block_size=4, num_blocks=16, max_num_batched_tokens=8, max_num_seqs=4, max_model_len=64)
        self.engine = AsyncEngine(
            Engine(Scheduler(limits), self.runner), on_result=self.on_result, on_crash=self.on_crash
        )
        self.results: list[StepResult] = []
        self.crashes: list[Exception] = []
        self.news = asyncio.Event()

    def on_result(self, result: StepResult) -> None:
        self.results.append(result)
        self.news.set()

    def on_crash(self, error: Exception) -> None:
        self.crashes.append(error)
        self.news.set()

    async def until_finished(self, *names: str) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not set(names) <= self.finished:
                self.news.clear()
                await self.news.wait()

    @property
    def finished(self) -> set[str]:
        return {o.request_id for result in self.results for o in result.outputs if o.finish_reason}


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench()
    await bench.engine.start()
    yield bench
    bench.runner.gate.set()
    await bench.engine.close(DEADLINE_S)


def request(name: str, max_tokens: int = 5) -> Request:
    return Request(
        request_id=RequestId(name), prompt_token_ids=[1, 2, 3], sampling=SamplingParams(max_tokens=max_tokens)
    )


async def test_requests_run_and_results_come_on_the_loop(bench: Bench) -> None:
    for name in "abc":
        bench.engine.submit(request(name))
    await bench.until_finished("a", "b", "c")
    tokens = [t for result in bench.results for o in result.outputs if o.request_id == "a" for t in o.token_ids]
    assert len(tokens) == 5
    await bench.engine.call(Engine.check_invariants)
    assert bench.engine.stats().num_free_blocks == 16
    assert bench.engine.step == bench.results[-1].step


async def test_admission_is_told_before_the_forward_pass(bench: Bench) -> None:
    """A transfer must not wait for a step that has nothing to do with it."""
    bench.runner.gate.clear()
    bench.engine.submit(request("a"))
    async with asyncio.timeout(DEADLINE_S):
        await bench.news.wait()
    assert [one.request.request_id for one in bench.results[0].admitted] == ["a"]
    assert not bench.results[0].outputs


async def test_numbers_change_with_what_is_told_and_not_before(bench: Bench) -> None:
    """Else one who adds up the seats that are taken and the admissions not heard of yet counts somebody twice."""
    bench.runner.gate.clear()
    bench.engine.submit(request("a"))
    assert bench.runner.entered.wait(DEADLINE_S), "its admission is on its way, but this loop has not turned"
    assert bench.engine.stats().num_running == 0
    async with asyncio.timeout(DEADLINE_S):
        await bench.news.wait()
    assert bench.engine.stats().num_running == 1


async def test_blocks_that_come_back_while_nothing_runs_are_seen(bench: Bench) -> None:
    blocks = await bench.engine.call(lambda engine: engine.scheduler.tables.pool.allocate(3))
    async with asyncio.timeout(DEADLINE_S):
        while bench.engine.stats().num_free_blocks != 13:
            await asyncio.sleep(0.001)
        await bench.engine.call(lambda engine: engine.scheduler.tables.pool.release(blocks))
        while bench.engine.stats().num_free_blocks != 16:
            await asyncio.sleep(0.001)


async def test_age_grows_while_a_step_hangs_and_is_zero_when_idle(bench: Bench) -> None:
    assert bench.engine.age_s == 0
    bench.runner.gate.clear()
    bench.engine.submit(request("a"))
    await asyncio.to_thread(bench.runner.entered.wait, DEADLINE_S)
    earlier = bench.engine.age_s
    await asyncio.sleep(0.01)
    assert bench.engine.age_s > earlier
    bench.runner.gate.set()
    await bench.until_finished("a")
    for _ in range(DEADLINE_S * 1000):
        if bench.engine.age_s == 0:
            break
        await asyncio.sleep(0.001)
    assert bench.engine.age_s == 0


async def test_cancel_frees_between_steps(bench: Bench) -> None:
    bench.runner.gate.clear()
    bench.engine.submit(request("a", 40))
    await asyncio.to_thread(bench.runner.entered.wait, DEADLINE_S)
    bench.engine.cancel(RequestId("a"))
    bench.runner.gate.set()
    assert await bench.engine.call(lambda engine: engine.stats().num_running) == 0
    assert "a" not in bench.finished


async def test_what_can_never_fit_is_refused_at_once_and_a_second_of_a_name_later(bench: Bench) -> None:
    with pytest.raises(InvalidRequest):
        bench.engine.submit(Request(request_id=RequestId("long"), prompt_token_ids=[1] * 64))
    bench.runner.gate.clear()
    bench.engine.submit(request("a"))
    bench.engine.submit(request("a"))
    bench.runner.gate.set()
    await bench.until_finished("a")
    assert [one.request_id for result in bench.results for one in result.failed] == ["a"]


async def test_a_crash_is_told_once_and_nobody_waits_on(bench: Bench) -> None:
    bench.runner.error = RuntimeError("out of memory")
    bench.runner.gate.clear()
    bench.engine.submit(request("a"))
    await asyncio.to_thread(bench.runner.entered.wait, DEADLINE_S)
    waiting = asyncio.create_task(bench.engine.call(Engine.stats))
    await asyncio.sleep(0)
    bench.runner.gate.set()
    async with asyncio.timeout(DEADLINE_S):
        with pytest.raises(EngineDead):
            await waiting
    assert [str(error) for error in bench.crashes] == ["out of memory"]
    with pytest.raises(EngineDead):
        bench.engine.submit(request("b"))


async def test_what_is_no_exception_is_a_crash_too(bench: Bench) -> None:
    """A panic of a library in Rust, say: a node whose engine is gone must not stay."""
    bench.runner.error = BaseException("panicked")
    bench.engine.submit(request("a"))
    async with asyncio.timeout(DEADLINE_S):
        while not bench.crashes:
            await asyncio.sleep(0.001)
    assert [str(error) for error in bench.crashes] == ["BaseException('panicked')"]


async def test_an_error_in_a_call_is_the_callers(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError):
        await bench.engine.call(lambda _: 1 / 0)
    bench.engine.submit(request("a"))
    await bench.until_finished("a")


async def test_close_has_a_deadline() -> None:
    bench = Bench()
    await bench.engine.start()
    bench.runner.gate.clear()
    bench.engine.submit(request("a"))
    await asyncio.to_thread(bench.runner.entered.wait, DEADLINE_S)
    with pytest.raises(EngineDead):
        await bench.engine.close(deadline_s=0.01)
    bench.runner.gate.set()
    await bench.engine.close(DEADLINE_S)
