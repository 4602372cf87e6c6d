"""A valid body and its prompts to what the dispatching half is asked: one request for each choice.

Choices of one prompt share its blocks by the prefix cache; each can be stopped on its own.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.models import MAX_CHOICES, GenerationBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.openai.sampling import resolve_max_tokens, sampling_of, seed_of
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import ClusterLimits, RoutedRequest


def routed_requests(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    limits: ClusterLimits,
    tokenizer: TextTokenizer,
    response_id: str,
) -> list[RoutedRequest]:
    num_choices = body.num_choices * len(prompts)
    if num_choices > MAX_CHOICES:
        message = f"{len(prompts)} prompts with n={body.num_choices} are more than {MAX_CHOICES} choices"
        raise InvalidRequest(message, "n", "invalid_value")
    requests: list[RoutedRequest] = []
    for prompt in prompts:
        max_tokens = resolve_max_tokens(body.asked_max_tokens, body.default_max_tokens, len(prompt.token_ids), limits)
        sampling = sampling_of(body, limits, tokenizer, max_tokens)
        requests += [
            RoutedRequest(
                request_id=response_id if num_choices == 1 else f"{response_id}-{len(requests) + index}",
                prompt_token_ids=prompt.token_ids,
                sampling=replace(sampling, seed=seed_of(body, index)),
                cache_salt=body.cache_salt or "",
                priority=body.priority or 0,
            )
            for index in range(body.num_choices)
        ]
    return requests
