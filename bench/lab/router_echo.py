"""An OpenAI server of one kind of answer: a stream of one token a tick."""

import asyncio
import re
from functools import partial
from itertools import cycle
from typing import cast

from kvasir.bench.lab.router_clock import Clock

_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
_OTHER = b'{"status":"ok","object":"list","data":[{"id":"m","object":"model"}],"model_path":"m"}'
_JSON = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (len(_OTHER), _OTHER)
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')  # a router may call it by its newer name
_EVENT = (
    b'data: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk","created":1700000000,'
    b'"model":"m","choices":[{"index":0,"delta":{"content":" %04d"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Echo(asyncio.Protocol):
    """One connection. Answers each POST with a stream, anything else with some JSON."""

    def __init__(self, running: "set[Echo]") -> None:
        self._running = running
        self._num_left = 0
        self._data = b""
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._running.discard(self)

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, separator, rest = self._data.partition(b"\r\n\r\n")
        if not separator:
            return
        lines = head.lower().split(b"\r\n")
        length = next((int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0)
        if len(rest) < length:
            return
        body, self._data = rest[:length], rest[length:]
        if lines[0].startswith(b"post /v1/chat/"):
            self._transport.write(_HEAD)
            found = _MAX_TOKENS.search(body)
            if found is None:  # answers of another length than asked for would be another measurement
                raise ValueError(f"no max_tokens in {body!r}")
            self._num_left = int(found[1])
            self._running.add(self)
        else:
            self._transport.write(_JSON)

    def emit(self, event: bytes) -> None:
        if self._is_paused:
            return
        self._num_left -= 1
        if self._num_left == 0:
            self._running.discard(self)
            event += b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
        self._transport.write(event)


async def serve_echo(clock: Clock, num_groups: int) -> None:
    groups: list[set[Echo]] = [set() for _ in range(num_groups)]
    turns = cycle(groups)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Echo(next(turns)), "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)

    def tick(group: set[Echo], number: int) -> None:
        event = _EVENT % number
        chunk = b"%x\r\n%b\r\n" % (len(event), event)
        for stream in list(group):
            stream.emit(chunk)

    await asyncio.gather(*(clock.run(number, partial(tick, group)) for number, group in enumerate(groups)))
