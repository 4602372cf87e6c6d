"""A valid body and its prompts to what the dispatching half is asked: one request for each prompt."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.models import MAX_CHOICES, GenerationBody
from kvasir.router.openai.prompts import Prompt
from kvasir.router.openai.sampling import drawn_seed, resolve_max_tokens, sampling_of
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import ClusterLimits, RoutedRequest, Sampling

_FEW_WORDS = 16
_FEW_IDS = 4096  # beyond these, lists of what may be said are read in a thread


async def routed_requests(
    body: GenerationBody,
    prompts: Sequence[Prompt],
    limits: ClusterLimits,
    tokenizer: TextTokenizer,
    response_id: str,
) -> list[RoutedRequest]:
    if body.num_sequences * len(prompts) > MAX_CHOICES:
        message = f"{len(prompts)} prompts with {body.num_sequences} choices each are more than {MAX_CHOICES} choices"
        raise InvalidRequest(message, "n", "invalid_value")
    lengths = [
        resolve_max_tokens(body.asked_max_tokens, body.default_max_tokens, len(prompt.token_ids), limits)
        for prompt in prompts
    ]
    sampling = await _sampling(body, limits, tokenizer, min(lengths))
    requests: list[RoutedRequest] = []
    for number, (prompt, max_tokens) in enumerate(zip(prompts, lengths, strict=True)):
        if len(prompts) > 1:
            sampling = replace(sampling, max_tokens=max_tokens, seed=drawn_seed(body.seed))
        request = RoutedRequest(
            request_id=response_id if len(prompts) == 1 else f"{response_id}-{number}",
            prompt_token_ids=prompt.token_ids,
            sampling=sampling,
            num_sequences=body.num_sequences,
            cache_salt=body.cache_salt or "",
            priority=body.priority or 0,
            deadline_s=body.timeout,
        )
        requests.append(request)
    return requests


async def _sampling(body: GenerationBody, limits: ClusterLimits, tokenizer: TextTokenizer, max_tokens: int) -> Sampling:
    """What all prompts share is read once, and long lists keep no other stream waiting."""
    if len(body.bad_words or ()) <= _FEW_WORDS and len(body.allowed_token_ids or ()) <= _FEW_IDS:
        return sampling_of(body, limits, tokenizer, max_tokens)
    return await asyncio.to_thread(sampling_of, body, limits, tokenizer, max_tokens)
