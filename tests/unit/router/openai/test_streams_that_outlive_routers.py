"""Two routers that share nothing but a Redis: a resumable stream goes on at either, each event of it once."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
import redis.asyncio

from tests.fake_engine import Fabric
from tests.fake_node import FakeNode
from tests.plain_http import NO_TLS
from tests.ports import held_port
from tests.sse import sse_events
from tests.tokenizers import save_byte_level
from tests.valkey import RedisServer

pytestmark = pytest.mark.asyncio(loop_scope="module")

REPO = Path(__file__).parents[4]
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
CHAT = {"messages": [{"role": "user", "content": "hello"}]}
REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": ["hello", "you"], "n": 2, "stop": "e", "return_token_ids": True}),
    ("/v1/chat/completions", {**CHAT, "n": 2}),
    ("/v1/responses", {"input": "hello"}),
]
NUM_TOKENS = 60
TIMEOUT_S = 60.0
Event = tuple[str, str]  # id, data


class RouterProcess:
    """`ports`: of HTTP and of the registry."""

    def __init__(self, folder: Path, redis_url: str, nodes: list[str], ports: tuple[int, int]) -> None:
        self.url = f"http://127.0.0.1:{ports[0]}"
        self._command = [
            *(sys.executable, "-m", "kvasir.router", "--model", str(folder), "--served-model-name", "m"),
            *("--port", str(ports[0]), "--grpc-listen", f"127.0.0.1:{ports[1]}", *nodes),
            *("--streams-redis-url", redis_url, "--heartbeat-timeout-s", "10"),
            *("--max-token-wait-s", "0"),  # an event a token, however busy the machine is
        ]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("KVASIR_")}
        environment = clean | {"PYTHONPATH": str(REPO / "src")}
        self._process = await asyncio.create_subprocess_exec(*self._command, env=environment)
        async with asyncio.timeout(TIMEOUT_S), self.client() as client:
            while True:
                try:
                    if (await client.get("/ready?prefill=1&decode=1")).status_code == 200:
                        return
                except httpx.TransportError:
                    assert self._process.returncode is None
                await asyncio.sleep(0.05)

    async def end(self, how: signal.Signals = signal.SIGKILL) -> None:
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(how)
            await asyncio.wait_for(self._process.wait(), TIMEOUT_S)

    def client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, timeout=60, verify=NO_TLS)

    async def metric(self, name: str) -> float:
        async with self.client() as client:
            text = (await client.get("/metrics")).text
        return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(name))

    async def read(
        self, path: str, body: dict[str, Any] | None, last_id: str = "", on_event: Callable[[int], Any] = lambda _: None
    ) -> list[Event]:
        """Until it ends, or breaks, or `on_event`, told how many there are, returns something true."""
        events: list[Event] = []
        headers = {"last-event-id": last_id} if last_id else {}
        try:
            async with (
                asyncio.timeout(TIMEOUT_S),
                self.client() as client,
                client.stream("POST", path, json=body, headers=headers) as response,
            ):
                assert response.status_code == 200, await response.aread()
                async for event in sse_events(response):
                    events.append(event)
                    if on_event(len(events)):
                        break
        except httpx.TransportError:
            assert events, "it was begun"
        return events


class Pair:
    def __init__(self, routers: list[RouterProcess], decode: FakeNode, redis: RedisServer) -> None:
        self.routers = routers
        self.decode = decode
        self.redis = redis

    @contextmanager
    def none_ends(self, most_tokens: int) -> Iterator[None]:
        """However slow routers and readers are meanwhile: no sequence has more tokens."""
        self.decode.behaviour.most_tokens = most_tokens
        try:
            yield
        finally:
            self.decode.behaviour.most_tokens = None


@pytest.fixture(scope="module")
def redis_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    folder = tmp_path_factory.mktemp("model")
    save_byte_level(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    fabric = Fabric()
    async with AsyncExitStack() as stack:
        prefill = await stack.enter_async_context(FakeNode("prefill", fabric))
        decode = await stack.enter_async_context(FakeNode("decode", fabric, token_s=0.002))
        nodes = ["--prefill", prefill.address, "--decode", decode.address]
        routers = []
        for _ in range(2):
            ports = stack.enter_context(held_port()), stack.enter_context(held_port())
            routers.append(RouterProcess(folder, redis_server.url, nodes, ports))
            stack.push_async_callback(routers[-1].end)
        await asyncio.gather(*(router.start() for router in routers))
        yield Pair(routers, decode, redis_server)


def asked(path: str, **body: Any) -> dict[str, Any]:
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": NUM_TOKENS}
    options = {"include_usage": True, "resume_grace_s": 60}
    return {"model": "m", "stream": True, "ignore_eos": True, "seed": 7, "stream_options": options, **limit, **body}


def texts(events: list[Event]) -> dict[int, str]:
    """By choice; those that came have ids without a gap."""
    assert [int(event_id.rpartition(":")[2]) for event_id, _ in events] == list(range(1, len(events) + 1))
    assert len({event_id.partition(":")[0].partition(".")[0] for event_id, _ in events}) == 1
    found: dict[int, str] = {}
    for content in (json.loads(data) for _, data in events if data != "[DONE]"):
        assert content.get("error") is None, content
        if content.get("type") == "response.output_text.delta":
            found[0] = found.get(0, "") + content["delta"]
        for choice in content.get("choices", ()):
            text = choice.get("text") or choice.get("delta", {}).get("content") or ""
            found[choice["index"]] = found.get(choice["index"], "") + text
    assert events[-1][1] == "[DONE]" or content["type"] == "response.incomplete"
    return found


@pytest.mark.parametrize(("path", "body"), REQUESTS, ids=[path for path, _ in REQUESTS])
async def test_a_client_goes_from_router_to_router(pair: Pair, path: str, body: dict[str, Any]) -> None:
    """Each time the other one has it, and lives: the stream moves, and moves back."""
    one, other = pair.routers
    whole = texts(await one.read(path, asked(path, **body)))
    events = await one.read(path, asked(path, **body), on_event=lambda number: number == 9)
    for router in (other, one, one, other):
        events += await router.read(path, None, events[-1][0], on_event=lambda number: number == 9)
    events += await one.read(path, None, events[-1][0])
    assert texts(events) == whole
    num_started = len(pair.decode.started)
    assert await other.read(path, None, events[5][0]) == events[6:], "and after its end, all the same"
    assert len(pair.decode.started) == num_started, "nothing is computed again"
    async with other.client() as client:
        elsewhere = await client.post("/v1/tokenize", headers={"last-event-id": events[5][0]})
        assert elsewhere.status_code == 404
        other_route = next(route for route, _ in REQUESTS if route != path)
        assert (await client.post(other_route, headers={"last-event-id": events[5][0]})).status_code == 404
        key = {"last-event-id": f"{events[5][0].rpartition(':')[0]}0:1"}
        assert (await client.post(path, headers=key)).status_code == 404, "nobody's"


async def test_whoever_still_reads_where_it_was_gets_no_token_more(pair: Pair) -> None:
    one, other = pair.routers
    path, body = REQUESTS[1]
    enough = asyncio.Event()
    await _clear(pair.redis)
    with pair.none_ends(100):  # of both choices: fewer than the 300 events that the other one is read for
        staying = asyncio.create_task(
            one.read(path, asked(path, **body, max_tokens=400), on_event=lambda number: number > 20 and enough.set())
        )
        await asyncio.wait_for(enough.wait(), TIMEOUT_S)
        stream = (await _only_key(pair.redis)).rpartition(":")[2]

        def go_on(number: int) -> bool:
            pair.decode.behaviour.most_tokens = None  # it has moved
            return number == 300

        moved = await other.read(path, None, f"{stream}:10", on_event=go_on)
        left = await staying
    assert left[-1][1] != "[DONE]"
    assert "error" not in left[-1][1], "it just ends, as a connection does"
    assert dict(left[10:]).items() <= dict(moved).items(), "the same events"


async def _clear(server: RedisServer) -> None:
    async with redis.asyncio.from_url(server.url) as client:
        await client.flushall()


async def _until_it_notes(router: RouterProcess) -> None:
    """One that has lost its Redis takes it into use again when it has next looked for it."""
    path, body = REQUESTS[1]
    async with asyncio.timeout(TIMEOUT_S):
        while "." in (await router.read(path, asked(path, **body, max_tokens=1)))[0][0]:
            await asyncio.sleep(0.1)


async def _only_key(server: RedisServer) -> str:
    async with redis.asyncio.from_url(server.url) as client:
        [key] = await client.keys("kvasir:stream:*")
        assert 0 < await client.pttl(key) <= 661_000
    return str(key.decode())


async def test_notes_that_are_older_than_what_the_client_has_are_no_help(pair: Pair) -> None:
    """As they are when their Redis was away for a while: what is generated again may come in other pieces."""
    one, other = pair.routers
    path, body = REQUESTS[1]
    await _clear(pair.redis)
    events = await one.read(path, asked(path, **body))
    key = await _only_key(pair.redis)
    async with redis.asyncio.from_url(pair.redis.url) as client:
        await client.ltrim(key, 0, 20)
    num_started = len(pair.decode.started)
    assert await other.read(path, None, events[-5][0]) == []
    async with other.client() as http:
        assert (await http.post(path, headers={"last-event-id": events[-5][0]})).status_code == 404
    assert len(pair.decode.started) == num_started


async def test_a_router_is_killed_in_the_midst(pair: Pair) -> None:
    one, other = pair.routers
    wholes = [texts(await other.read(path, asked(path, **body))) for path, body in REQUESTS]
    counts = [0] * len(REQUESTS)

    async def follow(at: int) -> list[Event]:
        path, body = REQUESTS[at]

        def seen(number: int) -> None:
            counts[at] = number

        events = await one.read(path, asked(path, **body), on_event=seen)
        return events + await other.read(path, None, events[-1][0])

    with pair.none_ends(NUM_TOKENS - 1):
        following = asyncio.gather(*(follow(at) for at in range(len(REQUESTS))))
        async with asyncio.timeout(TIMEOUT_S):
            while min(counts) < 10:
                await asyncio.sleep(0.001)
        num_started = len(pair.decode.started)
        await one.end()
    answers = await following
    assert [texts(events) for events in answers] == wholes
    begun = pair.decode.started[num_started:]
    assert begun, "they were cut short"
    assert all(any(handle.request.output_token_ids) for handle in begun), "they go on from where they were"
    await one.start()


async def test_a_router_that_stops_leaves_its_streams_to_others(pair: Pair) -> None:
    one, other = pair.routers
    path, body = REQUESTS[2]
    whole = texts(await other.read(path, asked(path, **body)))
    events = await one.read(path, asked(path, **body), on_event=lambda number: number == 9)
    await one.end(signal.SIGTERM)
    events += await other.read(path, None, events[-1][0])
    assert texts(events) == whole
    await one.start()


async def test_a_redis_that_fails_costs_the_way_back_and_nothing_else(pair: Pair) -> None:
    one, other = pair.routers
    path, body = REQUESTS[1]
    whole = texts(await one.read(path, asked(path, **body)))
    num_failures = await one.metric("kvasir:router_streams_failures_total")
    pair.redis.freeze()
    try:
        assert texts(await one.read(path, asked(path, **body))) == whole
        assert await one.metric("kvasir:router_streams_failures_total") == num_failures + 1
        events = await one.read(path, asked(path, **body), on_event=lambda number: number == 9)
        events += await one.read(path, None, events[-1][0])
        assert texts(events) == whole, "at the same router it needs no Redis"
        async with other.client() as client:
            mine = await client.post(path, headers={"last-event-id": events[5][0]})
            answer = await client.post(path, headers={"last-event-id": f"{events[5][0].partition('.')[0]}:6"})
        assert mine.status_code == 404, "nothing of it could be noted"
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    finally:
        pair.redis.thaw()

    def lose(number: int) -> bool:
        if number == 12:
            pair.redis.kill()
            pair.redis.start()
        return False

    events = await one.read(path, asked(path, **body), on_event=lose)
    assert texts(events) == whole
    async with asyncio.timeout(TIMEOUT_S), other.client() as client:
        while (answer := await client.post(path, headers={"last-event-id": events[5][0]})).status_code == 503:
            await asyncio.sleep(0.1)  # it does not ask again at once
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "stream_not_found"


async def test_what_only_one_router_knows_is_gone_on_with_there_alone(pair: Pair) -> None:
    """One has lost the Redis in mid-stream and goes on without; another one goes on from what had been noted."""
    one, other = pair.routers
    path, body = REQUESTS[1]
    whole = texts(await other.read(path, asked(path, **body)))
    for router in pair.routers:
        await _until_it_notes(router)
    await _clear(pair.redis)
    pair.decode.behaviour.most_tokens = NUM_TOKENS - 1

    def lose_the_redis(number: int) -> None:
        if number == 12:
            pair.redis.freeze()
            pair.decode.behaviour.most_tokens = None

    try:
        events = await one.read(path, asked(path, **body), on_event=lose_the_redis)
    finally:
        pair.decode.behaviour.most_tokens = None
        pair.redis.thaw()
    assert texts(events) == whole
    assert "." not in events[11][0]
    assert "." in events[-1][0], "nobody else was told of this one"
    assert await one.read(path, None, events[-5][0]) == events[-4:]
    async with other.client() as client:
        assert (await client.post(path, headers={"last-event-id": events[-5][0]})).status_code == 404
    moved = await other.read(path, None, events[5][0], on_event=lambda number: number == 15)
    async with asyncio.timeout(TIMEOUT_S), one.client() as client:
        while (await client.post(path, headers={"last-event-id": moved[-1][0]})).status_code == 503:
            await asyncio.sleep(0.1)  # it does not ask again at once
    back = await one.read(path, None, moved[-1][0])
    assert all("." not in event_id for event_id, _ in moved + back), "those of the one that it moved to"
    assert texts(events[:6] + moved + back) == whole
