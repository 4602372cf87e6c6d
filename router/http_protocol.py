"""HTTP as bytes: what the parser would gather without end is bounded, what is no HTTP is refused in OpenAI's body, and
other protocols are politely not spoken."""

import asyncio
from http import HTTPStatus
from typing import Any

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from kvasir.router.http_chunks import WRITE_CHUNK, ChunkWriter, GatheringTransport, Outbox
from kvasir.router.openai.errors import HttpError, error_body

_MAX_GATHERED_BYTES = 128 << 10  # of a request's head, or whatever else is not its body; and what one read may add


class _UntilClosed(int):
    """The length of a body that ends with its connection: whatever is sent of it, it is neither more nor less."""

    def __lt__(self, other: int) -> bool:
        return False

    def __sub__(self, other: int) -> "_UntilClosed":
        return self

    def __ne__(self, other: object) -> bool:
        return False


class BoundedHttpProtocol(HttpToolsProtocol):
    def __init__(self, *args: Any, outbox: Outbox, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._outbox = outbox
        self._num_gathered_bytes = 0  # that have come to nothing yet

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._gathering = GatheringTransport(transport, self._outbox)
        super().connection_made(self._gathering)

    def eof_received(self) -> None:
        """Whoever has nothing more to ask may still read; but after this, the transport closes itself."""
        self._gathering.flush()

    def data_received(self, data: bytes) -> None:
        self._num_gathered_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._num_gathered_bytes > _MAX_GATHERED_BYTES and not self.transport.is_closing():
            self.send_400_response("The head of the HTTP request is too long.")

    def _parse(self, data: bytes) -> None:
        """An offer to go on in another protocol (`Upgrade: h2c`, a WebSocket) is not taken: the request is answered in
        HTTP/1.1. The parser ends a request with its head there, and would read the body as the next request; so
        another parser is given the head without the offer, and then the rest."""
        rest = memoryview(data)
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
                head = self._head_without_upgrade()
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as the one before
                self._feed_head(head)

    def _feed_head(self, head: bytes) -> None:
        try:
            self.parser.feed_data(head)
        except httptools.HttpParserUpgrade:
            raise httptools.HttpParserError("CONNECT is for proxies") from None

    def _head_without_upgrade(self) -> bytes:
        lines = [b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        version = self.parser.get_http_version().encode()
        return b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(lines))

    def on_headers_complete(self) -> None:
        self._num_gathered_bytes = 0
        if self.parser.should_upgrade():
            return  # this parser is done
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":  # it knows no chunks
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = _UntilClosed()
        self.scope[WRITE_CHUNK] = ChunkWriter(self.cycle)  # type: ignore[literal-required]

    def on_body(self, body: bytes) -> None:
        self._num_gathered_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_gathered_bytes = 0
        if self.parser.should_upgrade():
            return
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        self.refuse(HttpError(400, msg, "invalid_http"))

    def refuse(self, error: HttpError) -> None:
        """In place of an answer, and the connection's last word."""
        content = orjson.dumps(error_body(error))
        headers = {"content-type": "application/json", "connection": "close", **error.headers}
        lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}", *map(": ".join, headers.items())]
        head = "\r\n".join([*lines, f"content-length: {len(content)}", "\r\n"])
        self.transport.write(head.encode() + content)
        self.transport.close()
