"""HTTP as bytes: what the parser would gather without end is bounded, what is no HTTP is refused in OpenAI's body."""

from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvasir.router.http_chunks import WRITE_CHUNK, ChunkWriter
from kvasir.router.openai.errors import HttpError, error_body

_MAX_GATHERED_BYTES = 128 << 10  # of a request's head, or whatever else is not its body; and what one read may add


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._num_gathered_bytes = 0  # that have come to nothing yet

    def data_received(self, data: bytes) -> None:
        self._num_gathered_bytes += len(data)
        super().data_received(data)
        if self._num_gathered_bytes > _MAX_GATHERED_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the HTTP request is too long.")

    def on_headers_complete(self) -> None:
        self._num_gathered_bytes = 0
        super().on_headers_complete()
        self.scope[WRITE_CHUNK] = ChunkWriter(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        self._num_gathered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_gathered_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        content = orjson.dumps(error_body(HttpError(400, msg, "invalid_http")))
        head = b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
        self.transport.write(head + b"content-length: %d\r\n\r\n" % len(content) + content)
        self.transport.close()
