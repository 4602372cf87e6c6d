"""The redis connector and servers of every kind: behind TLS, with users, replicas, read-only, unable to save."""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Self

import pytest
import redis

from kvasir.common.errors import KVTransferError
from kvasir.kv_connector.redis.connector import RedisConnector
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.testing import LARGE, pairs_of, random_keys, until
from tests.unit.kv_connector.store_tools import end_back_off, fetch, layout_of, settings_of
from tests.valkey import RedisServer

DEADLINE_S = 60.0
PASSWORD = "a-pass/word:that@nobody#may%see"
QUOTED = "a-pass%2Fword%3Athat%40nobody%23may%25see"
CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"


@pytest.fixture(scope="module")
def locked() -> Iterator[RedisServer]:
    """Only `kv` may do anything, under its own keys."""
    user = ("--user", "kv", "on", f">{PASSWORD}", "~kv:*", "+@all", "-@dangerous")
    with RedisServer("--user", "default", "on", "nopass", "+@all", "~*", *user) as server:
        with redis.Redis(port=server.port) as client:
            client.execute_command("ACL", "SETUSER", "probe", "on", "nopass", "+@all", "~*")
            client.execute_command("ACL", "SETUSER", "default", "resetpass", f">{PASSWORD}-of-default")
        yield server


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 18):
        writer.write(data)
        await writer.drain()
    raise EOFError


@asynccontextmanager
async def behind_tls(port: int) -> AsyncIterator[int]:
    """The port of a TLS endpoint before that server."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    connections: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        connections.add(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
        with suppress(OSError, EOFError, asyncio.CancelledError):
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        for end in (writer, there_writer):
            end.transport.abort()

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # for the transports to end


async def test_tls_user_password_and_database(locked: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), behind_tls(locked.port) as port:
        url = f"rediss://kv:{QUOTED}@localhost:{port}/3?ssl_ca_certs={CERTIFICATE}"
        settings = settings_of(locked, redis_url=url, redis_prefix="kv")
        for layout, num_blocks in ((LARGE, 20), (layout_of(10), 1)):
            async with pairs_of(settings)(layout, num_blocks=num_blocks) as pair:
                keys = random_keys(num_blocks)
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
                assert await pair.receiver.receiver.lookup(keys) == num_blocks
                assert await fetch(pair, keys) == ()
                with redis.Redis(port=locked.port, db=3, password=f"{PASSWORD}-of-default") as client:
                    assert len(list(client.scan_iter(f"kv:{keys[0].hex()}*"))) == 1


async def test_a_fetch_through_tls_that_was_cancelled(redis_server: RedisServer) -> None:
    async with asyncio.timeout(DEADLINE_S), behind_tls(redis_server.port) as port:
        url = f"rediss://localhost:{port}/0?ssl_ca_certs={CERTIFICATE}"
        async with pairs_of(settings_of(redis_server, redis_url=url))(LARGE) as pair:
            keys = random_keys(30)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
            for step in range(20):
                transfer = pair.receiver.receiver.fetch_stored(pair.wanted(keys), pair.on_block)
                await asyncio.sleep(step * 0.002)
                transfer.cancel()
                await transfer.done()
            assert await fetch(pair, keys) == ()
            pool = connector_of(pair.receiver.connector).pool
            await until(lambda: pool.num_links == pool.num_idle)


@pytest.mark.parametrize("how", ["unknown authority", "no TLS there", "TLS there"])
async def test_tls_that_fails(redis_server: RedisServer, how: str) -> None:
    async with asyncio.timeout(DEADLINE_S), behind_tls(redis_server.port) as port:
        url = {
            "unknown authority": f"rediss://localhost:{port}/0",
            "no TLS there": f"rediss://localhost:{redis_server.port}/0?ssl_ca_certs={CERTIFICATE}",
            "TLS there": f"redis://localhost:{port}/0",
        }[how]
        async with pairs_of(settings_of(redis_server, redis_url=url))() as pair:
            with pytest.raises(KVTransferError, match="no connection to Redis"):
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(1)))


async def test_credentials_are_in_no_message(locked: RedisServer, caplog: pytest.LogCaptureFixture) -> None:
    """Servers quote what they refuse, and so does the parser of URLs."""
    caplog.set_level(logging.DEBUG)
    messages = []
    for url in (
        f"redis://kv:{QUOTED}x@127.0.0.1:{locked.port}/0",
        f"redis://nobody:{QUOTED}@127.0.0.1:{locked.port}/0",
        f"redis://127.0.0.1:{locked.port}/0",
        f"redis://kv:{QUOTED}@127.0.0.1:1/0",
        f"redis://kv:{QUOTED}@no-such-host.invalid/0",
    ):
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(locked, redis_url=url))() as pair:
            with pytest.raises(KVTransferError) as raised:
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(1)))
            messages += [str(raised.value), repr(raised.value.__cause__), repr(raised.value.__context__)]
            assert await pair.receiver.receiver.lookup(random_keys(1)) == 0
    for url in (
        f"redis://kv:{PASSWORD}@127.0.0.1/0",
        f"redis://kv:{QUOTED}@h:port/0",
        f"kv:{QUOTED}",
        f"redis://{QUOTED}@h/0?secret=1",
        f"redis://{QUOTED}@h/0?socket_timeout={QUOTED}",
    ):
        with pytest.raises(ValueError, match="redis_url must be like") as bad:
            RedisConnector(settings_of(locked, redis_url=url))
        messages += [str(bad.value), repr(bad.value.__cause__)]
    said = "\n".join([*messages, caplog.text, repr(settings_of(locked, redis_url=f"redis://:{QUOTED}@h/0"))])
    assert "pass" not in said.replace("password@host", "")
    assert "nobody" not in said


def connector_of(connector: object) -> RedisConnector:
    assert isinstance(connector, RedisConnector)
    return connector


async def test_a_replica_is_read_and_refuses_to_be_written() -> None:
    with (
        RedisServer("--repl-diskless-sync-delay", "0") as server,
        RedisServer("--replicaof", f"127.0.0.1 {server.port}") as replica,
    ):
        async with (
            asyncio.timeout(DEADLINE_S),
            pairs_of(settings_of(server))() as pair,
            pairs_of(settings_of(replica))() as other,
        ):
            keys = random_keys(3)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
            while await other.receiver.receiver.lookup(keys) < 3:
                await asyncio.sleep(0.02)
            result = await other.receiver.receiver.fetch_stored(other.wanted(keys), other.on_block).done()
            assert result.missing == ()
            with pytest.raises(KVTransferError, match="Redis refuses: READONLY"):
                await other.sender.sender.publish(other.ticket(), other.outgoing(random_keys(1)))
            assert other.sender.metrics.store_failures == 1


class Address:
    """One that stays when the server behind it does not, as Sentinel and the clouds give it; for new connections."""

    def __init__(self, server: RedisServer) -> None:
        self.server = server
        self.port = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._listener.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.server.port)
        with suppress(OSError, EOFError, asyncio.CancelledError):
            await asyncio.gather(_copy(reader, there_writer), _copy(there_reader, writer))
        for end in (writer, there_writer):
            end.transport.abort()


async def test_a_master_that_has_become_a_replica_is_left_by_all_connections() -> None:
    async with asyncio.timeout(DEADLINE_S):
        with RedisServer() as old, RedisServer() as new, redis.Redis(port=old.port) as client:
            async with Address(old) as address:
                settings = settings_of(old, redis_url=f"redis://127.0.0.1:{address.port}/0")
                async with pairs_of(settings)() as pair:
                    pool = connector_of(pair.sender.connector).pool
                    while pool.num_idle < 3:
                        await asyncio.gather(*(pair.sender.receiver.lookup(random_keys(50)) for _ in range(4)))
                    client.replicaof("127.0.0.1", str(new.port))
                    address.server = new
                    with pytest.raises(KVTransferError, match="Redis refuses: READONLY"):
                        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(2)))
                    end_back_off(pair)
                    keys = random_keys(2)
                    await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
                    while await fetch(pair, keys):  # the receiver's connection is to the replica, which follows soon
                        await asyncio.sleep(0.05)
                        end_back_off(pair)
                    with redis.Redis(port=new.port) as other:
                        assert other.dbsize() == 2


async def test_a_password_that_is_new(redis_server: RedisServer) -> None:
    """Refused, and left alone, until it is known or gone."""
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(redis_server))() as pair:
        keys = random_keys(2)
        await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
        with redis.Redis(port=redis_server.port) as client:
            client.config_set("requirepass", PASSWORD)
            try:
                client.client_kill_filter(_type="normal", skipme=True)
                with pytest.raises(KVTransferError, match="Redis"):
                    await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(2)))
                assert pair.sender.metrics.store_failures == 1
            finally:
                client.config_set("requirepass", "")
        end_back_off(pair)
        assert await fetch(pair, keys) == ()


async def test_a_node_of_a_cluster_that_is_down() -> None:
    with RedisServer("--cluster-enabled", "yes") as server:
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))() as pair:
            keys = random_keys(3)
            with pytest.raises(KVTransferError, match="Redis refuses: CLUSTERDOWN"):
                await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
            assert await pair.receiver.receiver.lookup(keys) == 0
            assert await fetch(pair, keys) == (0, 1, 2)


async def test_a_server_that_cannot_save_refuses_to_be_written(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    with RedisServer("--dir", str(folder), "--save", "3600 1") as server:
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(server))() as pair:
            keys = random_keys(2)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
            folder.rmdir()
            with redis.Redis(port=server.port) as client:
                client.bgsave()
                while client.info("persistence")["rdb_last_bgsave_status"] == "ok":
                    await asyncio.sleep(0.02)
                with pytest.raises(KVTransferError, match="Redis refuses: MISCONF"):
                    await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(1)))
                assert await fetch(pair, keys) == ()
                client.config_set("stop-writes-on-bgsave-error", "no")
            end_back_off(pair)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(1)))


async def test_a_user_who_may_not_touch_our_keys(locked: RedisServer) -> None:
    url = f"redis://kv:{QUOTED}@127.0.0.1:{locked.port}/0"
    async with asyncio.timeout(DEADLINE_S), pairs_of(settings_of(locked, redis_url=url))() as pair:
        with pytest.raises(KVTransferError, match="Redis refuses: NOPERM"):
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(random_keys(1)))


async def test_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"
    with RedisServer("--unixsocket", str(path)) as server:
        settings = ConnectorSettings(name="redis", redis_url=f"unix://{path}?db=1")
        async with asyncio.timeout(DEADLINE_S), pairs_of(settings)(LARGE) as pair:
            keys = random_keys(20)
            await pair.sender.sender.publish(pair.ticket(), pair.outgoing(keys))
            assert await fetch(pair, keys) == ()
            with redis.Redis(port=server.port, db=1) as client:
                assert client.dbsize() == 20
