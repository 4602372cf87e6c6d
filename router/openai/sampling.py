"""A valid body and a prompt to what the nodes are told; everything that could never run is refused here."""

import secrets
from collections.abc import Sequence
from typing import Any

from kvasir.common.errors import InvalidRequest
from kvasir.router.openai.errors import wrong_type
from kvasir.router.openai.models import GenerationBody
from kvasir.router.text.text_stream import TextRules
from kvasir.router.text.tokenizer import TextTokenizer
from kvasir.router.types import ClusterLimits, Sampling

_MAX_STOP_STRINGS = 64
_MAX_STOP_CHARS = 4096
_GREEDY_BELOW = 1e-5  # dividing logits by less leaves one token anyway, or overflows


def check_prompt(token_ids: Sequence[int], limits: ClusterLimits, param: str) -> None:
    if not token_ids:
        raise InvalidRequest(f"'{param}' is empty: there must be at least one token", param, "empty_prompt")
    if len(token_ids) > max_prompt_tokens(limits):
        raise context_length_exceeded(limits, param, f"the prompt has {len(token_ids)} tokens")
    check_ids(token_ids, limits, param)


def max_prompt_tokens(limits: ClusterLimits) -> int:
    """One token at least must still fit behind it."""
    return min(limits.max_prompt_tokens, limits.max_model_len - 1)


def context_length_exceeded(limits: ClusterLimits, param: str, what: str) -> InvalidRequest:
    message = (
        f"this model's maximum context length is {limits.max_model_len} tokens, "
        f"and a prompt may have {max_prompt_tokens(limits)}; {what}"
    )
    return InvalidRequest(message, param, "context_length_exceeded")


def resolve_max_tokens(asked: int | None, default: int | None, num_prompt_tokens: int, limits: ClusterLimits) -> int:
    """More than the model's length is refused; more than the cache can hold ends early, with `length`."""
    if asked is not None and num_prompt_tokens + asked > limits.max_model_len:
        what = f"the prompt has {num_prompt_tokens} tokens and max_tokens asks for {asked} more"
        raise context_length_exceeded(limits, "max_tokens", what)
    room = min(limits.max_model_len, limits.max_prompt_tokens + 1) - num_prompt_tokens
    wanted = default if asked is None else asked
    return room if wanted is None else min(wanted, room)


def sampling_of(body: GenerationBody, limits: ClusterLimits, tokenizer: TextTokenizer, max_tokens: int) -> Sampling:
    min_tokens = body.min_tokens or 0
    if min_tokens > max_tokens:
        raise InvalidRequest(f"min_tokens is {min_tokens}, and max_tokens only {max_tokens}", "min_tokens")
    temperature = 1.0 if body.temperature is None else body.temperature
    top_p = 1.0 if body.top_p is None else body.top_p
    check_ids(body.stop_token_ids or (), limits, "stop_token_ids")
    check_ids(body.allowed_token_ids or (), limits, "allowed_token_ids")
    eos_token_ids = frozenset() if body.ignore_eos else limits.eos_token_ids | tokenizer.eos_token_ids
    stop_token_ids = eos_token_ids | frozenset(body.stop_token_ids or ())
    if min_tokens and body.allowed_token_ids and stop_token_ids.issuperset(body.allowed_token_ids):
        message = f"'allowed_token_ids' allows nothing but an end, and min_tokens is {min_tokens}"
        raise InvalidRequest(message, "allowed_token_ids", "invalid_value")
    return Sampling(
        temperature=temperature if temperature >= _GREEDY_BELOW else 0.0,
        top_p=max(top_p, 1e-6),  # 0 means the best token alone
        top_k=max(body.top_k or 0, 0),
        min_p=body.min_p or 0.0,
        seed=drawn_seed(body.seed),
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}, limits),
        min_tokens=min_tokens,
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        logprobs=0 if body.num_logprobs is None and body.num_sequences > body.num_choices else body.num_logprobs,
        prompt_logprobs=body.num_prompt_logprobs,
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=_bad_words(body.bad_words or (), tokenizer),
    )


def drawn_seed(asked: int | None) -> int:
    """Drawn where the client gave none: two calls then differ."""
    return secrets.randbits(64) if asked is None else asked % 2**64


def text_rules_of(body: GenerationBody) -> TextRules:
    return TextRules(
        stop=_stop_strings(body.stop),
        include_stop_str_in_output=body.include_stop_str_in_output or False,
        skip_special_tokens=body.skip_special_tokens is not False,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=frozenset(body.stop_token_ids or ()),
    )


def _stop_strings(stop: Any) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or not all(isinstance(entry, str) for entry in stops):
        raise wrong_type("stop", "a string or a list of strings")
    if not all(stops):
        raise InvalidRequest("'stop' must not hold an empty string", "stop", "invalid_value")
    if len(stops) > _MAX_STOP_STRINGS or sum(map(len, stops)) > _MAX_STOP_CHARS:
        limit = f"{_MAX_STOP_STRINGS} strings, and {_MAX_STOP_CHARS} characters in all"
        raise InvalidRequest(f"'stop' may hold at most {limit}", "stop", "invalid_value")
    return tuple(stops)


def check_ids(token_ids: Sequence[int], limits: ClusterLimits, param: str) -> None:
    for token_id in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= token_id < limits.vocab_size:
            message = f"'{param}': {token_id} is no token id of this model, which are 0 to {limits.vocab_size - 1}"
            raise InvalidRequest(message, param, "invalid_token_id")


def _logit_bias(bias: dict[str, float], limits: ClusterLimits) -> tuple[tuple[int, float], ...]:
    for key in bias:
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise InvalidRequest(f"'logit_bias': {key[:40]!r} is no token id", "logit_bias", "invalid_token_id")
    of_tokens = {int(key): value for key, value in bias.items()}  # "05" is 5, too: none may come twice
    check_ids(list(of_tokens), limits, "logit_bias")
    return tuple(sorted(of_tokens.items()))


def _bad_words(words: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], ...]:
    """Each word as it stands at the start of a text and after a space."""
    sequences: list[tuple[int, ...]] = []
    for word in words:
        bare = word.lstrip(" ")
        if not bare:
            raise InvalidRequest("'bad_words' must not hold an empty word", "bad_words", "invalid_value")
        sequences += [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in (bare, f" {bare}")]
    return tuple(dict.fromkeys(sequences))
