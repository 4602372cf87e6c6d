"""`python -m kvasir.router.text.render_process`: renders one conversation by a template that nobody has to trust.

    stdin   one frame: what `ChatRenderer` has to be rendered
    stdout  a frame when ready, then one: {"text"} or {"error"}

A frame holds JSON. Whoever started it ends it if it takes too long; too much memory, or a processor for too long, end
it by themselves.
"""

import json
import resource
import sys
from typing import Any

from jinja2 import TemplateError

from kvasir.common.errors import InvalidRequest
from kvasir.router.framed_process import read_frame, write_frame
from kvasir.router.text.chat_template import Arguments, ChatTemplate

_MAX_MEMORY_BYTES = 512 << 20
_MAX_CPU_S = 30
_MAX_TEXT_CHARS = 32 << 20


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MAX_MEMORY_BYTES, _MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
    write_frame(sys.stdout.buffer, b"")
    if (work := read_frame(sys.stdin.buffer)) is not None:
        write_frame(sys.stdout.buffer, json.dumps(_rendered(json.loads(work))).encode())


def _rendered(work: dict[str, Any]) -> dict[str, str]:
    try:
        template = ChatTemplate(work["template"], work["special_tokens"])
        text = template.render([_message(message) for message in work["messages"]], **work["options"])
    except TemplateError as error:
        return {"error": f"'chat_template' is no template: {error}"}
    except InvalidRequest as error:
        return {"error": str(error)}
    except MemoryError:
        return {"error": "'chat_template' wants too much memory"}
    return {"text": text} if len(text) <= _MAX_TEXT_CHARS else {"error": "'chat_template' makes too long a text"}


def _message(message: dict[str, Any]) -> dict[str, Any]:
    """JSON knows mappings only; arguments are a little more."""
    for call in message.get("tool_calls", ()):
        if isinstance(call["function"]["arguments"], dict):
            call["function"]["arguments"] = Arguments(call["function"]["arguments"])
    return message


if __name__ == "__main__":
    main()
