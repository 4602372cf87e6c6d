"""Sends the prompts of a load, each at its time, and never more at once than allowed."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace

from kvasir.bench.openai_client import Outcome
from kvasir.bench.workload import Prompt

Send = Callable[[Prompt], Awaitable[Outcome]]


@dataclass(frozen=True, slots=True)
class LoadResult:
    outcomes: tuple[Outcome, ...]  # in the order of the prompts
    duration_s: float


def _ignore(outcome: Outcome) -> None:
    pass


async def run_load(
    prompts: Sequence[Prompt],
    send: Send,
    arrivals_s: Sequence[float] | None = None,
    max_concurrency: int | None = None,
    on_outcome: Callable[[Outcome], None] = _ignore,
) -> LoadResult:
    """A request whose turn has not come when it is due waits in the client; that wait is no part of its latency.

    arrivals_s: when each is due, from the start; None: all at once.
    """
    seats: AbstractAsyncContextManager[object] = (
        asyncio.Semaphore(max_concurrency) if max_concurrency else nullcontext()
    )
    dues_s = arrivals_s or [0.0] * len(prompts)
    started_s = time.perf_counter()

    async def send_at(prompt: Prompt, due_s: float) -> Outcome:
        await asyncio.sleep(started_s + due_s - time.perf_counter())
        async with seats:
            outcome = await send(prompt)
        outcome = replace(outcome, queued_s=max(0.0, outcome.sent_s - started_s - due_s))
        on_outcome(outcome)
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(send_at(*pair)) for pair in zip(prompts, dues_s, strict=True)]
    return LoadResult(tuple(task.result() for task in tasks), time.perf_counter() - started_s)
