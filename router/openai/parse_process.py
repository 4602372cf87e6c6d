"""`python -m kvasir.router.openai.parse_process`: reads large bodies, for nobody else runs while that is done.

    stdin   a frame for each body: a line with its kind and how many tokens and characters a prompt may have, the body
    stdout  a frame for each: pickled, (what it came to, how many fields nobody knows), or what is wrong with it

Whoever takes an answer is busy with all that is in it. So what is too long for the model is refused here, and the parts
of a message are one text already.
"""

import pickle
import resource
import signal
import sys
from collections.abc import Iterable
from typing import Any

from kvasir.common.errors import InvalidRequest
from kvasir.router.framed_process import read_frame, write_frame
from kvasir.router.openai.conversation import with_plain_texts
from kvasir.router.openai.models import MAX_CHOICES, ChatBody, CompletionBody
from kvasir.router.openai.parsing import json_object, parse
from kvasir.router.openai.responses.body import ResponsesBody

KINDS = {kind.__name__: kind for kind in (ChatBody, CompletionBody, ResponsesBody)}
JSON_OBJECT = "object"  # the kind of a body that is validated elsewhere
_MAX_MEMORY_BYTES = 4 << 30
_MAX_VALUES = 1 << 20  # whoever gets them is busy with them, too


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the router, which then ends our stdin
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    write_frame(sys.stdout.buffer, b"")
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        line, _, data = frame.partition(b"\n")
        kind, max_tokens, max_chars = line.decode().split()
        found = answer(kind, int(max_tokens), int(max_chars), data)
        write_frame(sys.stdout.buffer, pickle.dumps(found, pickle.HIGHEST_PROTOCOL))


def answer(
    kind: str, max_tokens: int, max_chars: int, data: bytes
) -> tuple[Any, int] | tuple[str, str | None, str | None]:
    """An error is (message, param, code)."""
    try:
        fields = json_object(data)
        _check(fields, max_tokens, max_chars)
        if kind == JSON_OBJECT:
            return fields, 0
        body, num_unknown = parse(fields, KINDS[kind])
        return with_plain_texts(body) if isinstance(body, ChatBody) else body, num_unknown
    except InvalidRequest as error:
        return str(error), error.param, error.code
    except MemoryError:
        return "the body takes too much memory", None, "invalid_json"


def _check(fields: dict[str, Any], max_tokens: int, max_chars: int) -> None:
    if _amounts(fields)[0] > _MAX_VALUES:
        raise InvalidRequest(f"the body has more than {_MAX_VALUES} values", code="invalid_json")
    for param in ("prompt", "messages", "input"):
        value = fields.get(param)
        prompts = [value]
        if param == "prompt" and isinstance(value, list) and value and not isinstance(value[0], int | float):
            prompts = value
        for prompt in prompts:
            num_values, num_chars = _amounts(prompt)
            if num_chars > max_chars:
                raise _too_long(param, f"{num_chars} characters", max_tokens)
            if param == "prompt" and num_values > max_tokens + MAX_CHOICES:
                raise _too_long(param, f"{num_values} entries", max_tokens)


def _amounts(value: Any) -> tuple[int, int]:
    """How many values are in it, and how many characters."""
    num_values = num_chars = 0
    left: list[Iterable[Any]] = [(value,)]
    while left:
        for one in left.pop():
            num_values += 1
            if isinstance(one, str):
                num_chars += len(one)
            elif isinstance(one, dict):
                left.append(one.values())
            elif isinstance(one, list):
                left.append(one)
    return num_values, num_chars


def _too_long(param: str, what: str, max_tokens: int) -> InvalidRequest:
    message = f"a prompt of this model may have {max_tokens} tokens; '{param}' has {what}"
    return InvalidRequest(message, param, "context_length_exceeded")


if __name__ == "__main__":
    main()
