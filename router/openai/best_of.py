"""`best_of`: more sequences are generated than are sent, and the most likely ones of each prompt are taken."""

from collections.abc import Mapping

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.generation import ChoiceDelta
from kvasir.router.openai.models import CompletionBody


def check_best_of(body: CompletionBody) -> None:
    if body.best_of is None or body.best_of in (1, body.num_choices):
        return
    if body.best_of < body.num_choices:
        raise InvalidRequest(f"'best_of' is {body.best_of}, and 'n' {body.num_choices}", "best_of", "invalid_value")
    if body.stream:
        raise InvalidRequest("'best_of' more than 'n' cannot be streamed", "best_of", "invalid_value")


def best_choices(
    sequences: Mapping[int, list[ChoiceDelta]], num_sequences: int, num_choices: int
) -> dict[int, list[ChoiceDelta]]:
    """Of each prompt's `num_sequences`, the `num_choices` with the highest log probability per token; best first."""
    if num_sequences == num_choices:
        return dict(sequences)
    choices: list[list[ChoiceDelta]] = []
    for first in range(0, len(sequences), num_sequences):
        of_prompt = [sequences[index] for index in range(first, first + num_sequences)]
        choices += sorted(of_prompt, key=logprob_per_token, reverse=True)[:num_choices]
    return dict(enumerate(choices))


def logprob_per_token(deltas: list[ChoiceDelta]) -> float:
    logprobs = [position.entries[0][1] for delta in deltas for position in delta.logprobs]
    return sum(logprobs) / max(len(logprobs), 1)
