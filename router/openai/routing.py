"""A valid body and its prompts to what the dispatching half is asked: one request for each prompt."""

from collections.abc import Sequence

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.models import MAX_CHOICES, GenerationBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.openai.sampling import resolve_max_tokens, sampling_of
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import ClusterLimits, RoutedRequest


def routed_requests(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    limits: ClusterLimits,
    tokenizer: TextTokenizer,
    response_id: str,
) -> list[RoutedRequest]:
    if body.num_sequences * len(prompts) > MAX_CHOICES:
        message = f"{len(prompts)} prompts with {body.num_sequences} choices each are more than {MAX_CHOICES} choices"
        raise InvalidRequest(message, "n", "invalid_value")
    requests: list[RoutedRequest] = []
    for number, prompt in enumerate(prompts):
        max_tokens = resolve_max_tokens(body.asked_max_tokens, body.default_max_tokens, len(prompt.token_ids), limits)
        request = RoutedRequest(
            request_id=response_id if len(prompts) == 1 else f"{response_id}-{number}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling_of(body, limits, tokenizer, max_tokens),
            num_sequences=body.num_sequences,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            deadline_s=body.timeout,
        )
        requests.append(request)
    return requests
