"""The protocol by hand: cut anywhere, closed anywhere, garbage, and another thread that ends it."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.redis.commands import command, command_around
from kvasir.kv_connector.redis.link import RedisLink, Refusal
from tests.unit.kv_connector.redis.fake_connection import FakeConnection

ANSWERS = b"+OK\r\n$5\r\nvalue\r\n:17\r\n$-1\r\n-OOM command not allowed\r\n$0\r\n\r\n_\r\n$11\r\n\r\n$-1\r\n\r\n:1\r\n"
UNDERSTOOD = [1, b"value", 17, None, Refusal("OOM"), b"", None, b"\r\n$-1\r\n\r\n:1"]


@pytest.fixture
def server() -> Iterator[FakeConnection]:
    with FakeConnection() as connection:
        yield connection


def link_to(server: FakeConnection, timeout_s: float = 60.0) -> RedisLink:
    return RedisLink(server, timeout_s)


def read_all(link: RedisLink) -> list[object]:
    place = memoryview(bytearray(100))

    def value() -> object:
        size = link.read_value(place)
        return bytes(place[:size]) if isinstance(size, int) else size

    return [link.read_number(), value(), link.read_number(), *(value() for _ in range(5))]


@pytest.mark.parametrize("at_once", [1, 2, 3, 7, 1000])
def test_answers_cut_anywhere(server: FakeConnection, at_once: int) -> None:
    server.answer(ANSWERS, at_once)
    assert read_all(link_to(server)) == UNDERSTOOD


def test_answers_that_end_anywhere() -> None:
    for end in range(len(ANSWERS) - 5):
        with FakeConnection() as server:
            server.answer(ANSWERS[:end])
            link = link_to(server)
            with pytest.raises(KVTransferError, match="closed by the server"):
                read_all(link)
            assert link.is_closed


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 400 Bad Request\r\n",
        b"$abc\r\n",
        b"$-2\r\n",
        b"$1_0\r\n1234567890\r\n",
        b"$5\r\nvalueXX\r\n",
        b"$536870913\r\n",
        b"$99999999999999999999\r\n",
        b"*1\r\n$5\r\nvalue\r\n",
        b"\r\n",
        b"x" * 5000,
        b"+OK\r\n",
    ],
)
def test_what_is_no_value(server: FakeConnection, answer: bytes) -> None:
    server.answer(answer)
    link = link_to(server)
    with pytest.raises(KVTransferError, match="not of its protocol"):
        link.read_value(memoryview(bytearray(10)))
    assert link.is_closed


def test_a_value_that_is_larger_than_its_place_is_read_past(server: FakeConnection) -> None:
    server.answer(b"$3000000\r\n" + bytes(3_000_000) + b"\r\n$2\r\nab\r\n")
    link, place = link_to(server), memoryview(bytearray(10))
    assert link.read_value(place) == 0
    assert link.read_value(place) == 2
    assert place == b"ab" + bytes(8)


def test_what_is_sent_is_whole_whatever_the_socket_takes_at_once(server: FakeConnection) -> None:
    link, received = link_to(server), bytearray()
    value = memoryview(bytes(range(256)) * 20_000)
    expected = b"*3\r\n$3\r\nSET\r\n$1\r\nk\r\n$%d\r\n" % value.nbytes + value + b"\r\n" + command(b"GET", b"k")

    def receive() -> None:
        while len(received) < len(expected):
            received.extend(server.server.recv(100_000))

    receiver = threading.Thread(target=receive, daemon=True)
    receiver.start()
    head, tail = command_around(b"SET", b"k", value_bytes=value.nbytes)
    link.send(head, value, tail, command(b"GET", b"k"))
    receiver.join(60)
    assert received == expected


def test_a_server_that_says_nothing_is_given_up(server: FakeConnection) -> None:
    link = link_to(server, timeout_s=0.05)
    with pytest.raises(KVTransferError, match="timed out"):
        link.read_number()
    assert link.is_closed


def wait_for_the_rest(link: RedisLink) -> None:
    link.read_value(memoryview(bytearray(10)))


def send_what_is_not_taken(link: RedisLink) -> None:
    link.send(memoryview(bytes(100 << 20)))


@pytest.mark.parametrize("use", [wait_for_the_rest, send_what_is_not_taken])
def test_cut_from_another_thread(server: FakeConnection, use: Callable[[RedisLink], None]) -> None:
    link, errors = link_to(server), []

    def blocked() -> None:
        try:
            use(link)
        except KVTransferError as error:
            errors.append(error)

    thread = threading.Thread(target=blocked, daemon=True)
    server.server.sendall(b"$10\r\nabc")
    thread.start()
    time.sleep(0.02)
    link.cut()
    thread.join(60)
    assert len(errors) == 1
    link.cut()  # harmless when it is over


def test_a_link_on_which_something_waits_is_not_idle(server: FakeConnection) -> None:
    link = link_to(server)
    assert link.is_idle
    server.server.sendall(b"+OK\r\n")
    assert not link.is_idle
    assert link.read_number() == 1
    assert link.is_idle
    server.server.sendall(b"+OK\r\n:1\r\n")
    assert link.read_number() == 1
    assert not link.is_idle
    assert link.read_number() == 1
    server.server.close()
    assert not link.is_idle


@pytest.mark.parametrize(
    ("said", "kind"),
    [
        (b"OOM command not allowed when used memory > 'maxmemory'.", "OOM"),
        (b"ERR unknown command 'AUTH', with args beginning with: 'a-password'", "ERR"),
        (b"MOVED 3999 10.0.0.7:6379", "MOVED"),
        (b"a-password", "an error"),
        (b"APASSWORDx y", "an error"),
        (b"", "an error"),
    ],
)
def test_of_a_refusal_only_its_kind_is_repeated(server: FakeConnection, said: bytes, kind: str) -> None:
    server.answer(b"-" + said + b"\r\n")
    assert link_to(server).read_number() == Refusal(kind)
