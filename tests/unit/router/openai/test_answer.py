"""What is around a generation closes it, and does not leave that to the garbage collector."""

from collections.abc import AsyncGenerator

from kvasir.common.metrics import Metrics
from kvasir.router.metrics import RouterMetrics
from kvasir.router.openai.answer import AnswerRecord
from kvasir.router.openai.envelope import Envelope
from kvasir.router.openai.generation import ChoiceDelta


async def test_closing_the_record_closes_the_generation_at_once() -> None:
    is_closed = False

    async def deltas() -> AsyncGenerator[ChoiceDelta, None]:
        nonlocal is_closed
        try:
            while True:
                yield ChoiceDelta(
                    index=0, text="a", token_ids=(1,), logprobs=(), finish_reason=None, num_cached_tokens=0
                )
        finally:
            is_closed = True

    envelope = Envelope(response_id="r", created=0, model="m", prompt_lengths=(1,), num_choices=1, num_sequences=1)
    generation = deltas()
    answer = AnswerRecord(RouterMetrics(Metrics({})).begin("completions"), envelope).recorded(generation)
    await anext(answer)
    await answer.aclose()
    assert is_closed
