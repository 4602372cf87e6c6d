"""Calls to real gRPC servers, and to who is none."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import grpc
import grpc.aio
import pytest

from kvasir.common.grpc_server import bind, new_server
from kvasir.router.grpc_stream import GrpcStream, open_stream
from tests.tcp_proxy import TcpProxy
from tests.waiting import until

WITHIN_S = 60
METHOD = "/kvasir.test.Service/Call"
Handler = Callable[[AsyncIterator[bytes], Any], AsyncIterator[bytes]]


async def echo(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


@asynccontextmanager
async def serving(handler: Handler, secret: str | None = None) -> AsyncIterator[tuple[str, grpc.aio.Server]]:
    server = new_server("127.0.0.1:0", secret, max_message_bytes=4 << 20)
    method = grpc.stream_stream_rpc_method_handler(cast(Any, handler))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvasir.test.Service", {"Call": method}),))
    port = bind(server, "127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}", server
    finally:
        await server.stop(None)


@asynccontextmanager
async def calling(
    address: str, secret: str | None = None, max_message_bytes: int = 4 << 20
) -> AsyncIterator[tuple[GrpcStream, list[bytes]]]:
    """The call, and what comes."""
    messages: list[bytes] = []
    async with asyncio.timeout(WITHIN_S):
        stream = await open_stream(address, METHOD, secret, messages.append, max_message_bytes)
        try:
            yield stream, messages
        finally:
            stream.close()


async def end_of(handler: Handler, *sent: bytes) -> str:
    async with serving(handler) as (address, _), calling(address) as (stream, _):
        for message in sent:
            stream.send(message)
        return await stream.ended()


# --- real servers ------------------------------------------------------------------------------------------------


_SIZES = [0, 1, 4, 16_378, 16_379, 16_380, 65_530, 65_531, 65_536, 3 << 20, 0, 2 << 20, 7]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param([bytes([index]) * size for index, size in enumerate(_SIZES)], id="of all sizes"),
        pytest.param([index.to_bytes(3) for index in range(1000)], id="many small ones"),
    ],
)
async def test_messages_come_through_both_ways_in_order(sent: list[bytes]) -> None:
    async with serving(echo) as (address, _), calling(address) as (stream, messages):
        for message in sent:
            stream.send(message)
        await until(lambda: len(messages) == len(sent))
        assert messages == sent


async def test_what_the_server_does_not_take_yet_is_kept_for_it() -> None:
    may_read = asyncio.Event()

    async def late(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield b"here"
        await may_read.wait()
        async for message in messages:
            yield message[:1]

    async with serving(late) as (address, _), calling(address) as (stream, messages):
        await until(lambda: messages == [b"here"])
        for index in range(40):
            stream.send(bytes([index]) * 1_000_000)
        assert messages == [b"here"]
        may_read.set()
        await until(lambda: len(messages) == 41)
        assert messages[1:] == [bytes([index]) for index in range(40)]


async def test_only_the_right_secret_gets_in() -> None:
    async with serving(echo, secret="open sesame") as (address, _):
        async with calling(address, "open sesame") as (stream, messages):
            stream.send(b"hello")
            await until(lambda: messages == [b"hello"])
        for wrong in (None, "open barley"):
            async with calling(address, wrong) as (stream, messages):
                assert await stream.ended() == "UNAUTHENTICATED: the cluster secret is missing or wrong"
                stream.send(b"too late")


async def test_the_server_says_why_it_ends() -> None:
    async def refuse(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield await anext(messages)
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "größer als 100 %")

    async def leave(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield await anext(messages)

    async def fail(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        yield await anext(messages)
        raise ArithmeticError("fault")

    assert await end_of(refuse, b"x") == "INVALID_ARGUMENT: größer als 100 %"
    assert await end_of(leave, b"x") == "the call is done"
    assert (await end_of(fail, b"x")).startswith("UNKNOWN: Unexpected <class 'ArithmeticError'>")


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving(echo) as (address, _), asyncio.timeout(WITHIN_S):
        stream = await open_stream(address, "/kvasir.test.Service/Other", None, [].append)
        try:
            assert (await stream.ended()).startswith("UNIMPLEMENTED: ")
        finally:
            stream.close()


async def test_messages_over_the_bound_end_the_call_on_either_side() -> None:
    assert (await end_of(echo, bytes((4 << 20) + 1))).startswith("RESOURCE_EXHAUSTED: ")
    async with serving(echo) as (address, _), calling(address, max_message_bytes=1000) as (stream, messages):
        stream.send(bytes(1000))
        stream.send(bytes(1001))
        assert await stream.ended() == "it does not speak gRPC: a message of 1001 bytes, encoding 0"
        assert [len(message) for message in messages] == [1000]


async def test_closing_cancels_the_call_there() -> None:
    has_begun, was_cancelled = asyncio.Event(), asyncio.Event()

    async def wait(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        has_begun.set()
        try:
            await asyncio.Event().wait()
            yield b""
        except asyncio.CancelledError:
            was_cancelled.set()
            raise

    async with serving(wait) as (address, _):
        async with calling(address) as (stream, _):
            await has_begun.wait()
        async with asyncio.timeout(WITHIN_S):
            await was_cancelled.wait()
        assert await stream.ended() == "closed on this side"
        stream.close()


async def test_a_server_that_stops_lets_the_call_go_on_as_long_as_its_grace() -> None:
    async def count(messages: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for message in messages:
            yield message
            if message == b"last":
                return

    async with serving(count) as (address, server), calling(address) as (stream, messages):
        stream.send(b"first")
        await until(lambda: len(messages) == 1)
        stopping = asyncio.create_task(server.stop(WITHIN_S))
        await until(lambda: not stopping.done())
        for word in (b"second", b"third", b"last"):
            stream.send(word)
            await until(lambda word=word: messages[-1] == word)
        assert await stream.ended() == "the call is done"
        await stopping


async def test_a_server_that_stops_at_once_ends_the_call() -> None:
    async with serving(echo) as (address, server), calling(address) as (stream, messages):
        stream.send(b"first")
        await until(lambda: len(messages) == 1)
        await server.stop(None)
        assert await stream.ended()


async def test_a_cut_connection_ends_the_call() -> None:
    async with serving(echo) as (address, _), TcpProxy(address) as proxy, calling(proxy.address) as (stream, messages):
        stream.send(b"first")
        await until(lambda: len(messages) == 1)
        proxy.cut()
        assert (await stream.ended()).startswith("the connection is lost (")


async def test_nobody_there_is_an_oserror_and_no_address_a_valueerror() -> None:
    with pytest.raises(OSError):
        await open_stream("127.0.0.1:1", METHOD, None, [].append)
    with pytest.raises(ValueError):
        await open_stream("nowhere", METHOD, None, [].append)


# --- peers of our own ----------------------------------------------------------------------------------------------


@asynccontextmanager
async def peer(answer: Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await answer(reader, writer)
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await server.wait_closed()


async def test_who_speaks_http_1_is_told_of() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"SM\r\n\r\n")
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    async with peer(answer) as address, calling(address) as (stream, _):
        assert (await stream.ended()).startswith("it does not speak gRPC: a frame of ")
