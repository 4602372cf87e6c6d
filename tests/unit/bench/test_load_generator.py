import asyncio
import time

from kvasir.bench.load_generator import run_load
from kvasir.bench.openai_client import Outcome
from kvasir.bench.workload import Prompt

PROMPTS = [Prompt(content=f"prompt {index}", num_output_tokens=1) for index in range(12)]


class Sender:
    """Holds each request until `together` of them are in flight, or until nothing more is coming."""

    def __init__(self, together: int) -> None:
        self.running = self.most_running = 0
        self._together = together
        self._full = asyncio.Event()

    async def __call__(self, prompt: Prompt) -> Outcome:
        sent_s = time.perf_counter()
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        if self.running == self._together:
            self._full.set()
        await asyncio.wait_for(self._full.wait(), 60)
        await asyncio.sleep(0)
        self.running -= 1
        return Outcome(sent_s=sent_s, text=str(prompt.content))


async def test_outcomes_keep_the_order_of_the_prompts_and_each_is_told() -> None:
    told: list[Outcome] = []
    load = await run_load(PROMPTS, Sender(12), on_outcome=told.append)
    assert [outcome.text for outcome in load.outcomes] == [prompt.content for prompt in PROMPTS]
    assert sorted(outcome.text for outcome in told) == sorted(str(prompt.content) for prompt in PROMPTS)
    assert load.duration_s > 0


async def test_without_a_limit_all_are_in_flight_at_once() -> None:
    sender = Sender(12)
    await run_load(PROMPTS, sender)
    assert sender.most_running == 12


async def test_never_more_at_once_than_allowed() -> None:
    sender = Sender(3)
    load = await run_load(PROMPTS, sender, max_concurrency=3)
    assert sender.most_running == 3
    assert max(outcome.queued_s for outcome in load.outcomes) > 0


async def test_no_request_is_sent_before_its_time() -> None:
    arrivals_s = [index * 0.01 for index in range(12)]
    started_s = time.perf_counter()
    load = await run_load(PROMPTS, Sender(1), arrivals_s)
    for outcome, due_s in zip(load.outcomes, arrivals_s, strict=True):
        assert outcome.sent_s - started_s >= due_s


async def test_no_prompts_no_outcomes() -> None:
    assert (await run_load([], Sender(1), [])).outcomes == ()
