import os
from collections.abc import Callable

import pytest
import redis

from tests.valkey import RedisServer


def client_of(server: RedisServer, timeout_s: float = 60.0) -> redis.Redis:
    return redis.Redis.from_url(server.url, socket_timeout=timeout_s, retry=None)


def test_it_serves_with_the_options_given_and_is_gone_afterwards() -> None:
    with RedisServer("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru") as server, client_of(server) as client:
        assert client.config_get("maxmemory") == {"maxmemory": str(64 << 20)}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "allkeys-lru"}
        pid = server.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_two_at_once_are_two() -> None:
    with RedisServer() as one, RedisServer() as other, client_of(one) as client, client_of(other) as elsewhere:
        client.set("key", "value")
        assert elsewhere.get("key") is None


def test_a_frozen_one_is_silent_until_it_thaws() -> None:
    with RedisServer() as server, client_of(server) as client:
        client.set("key", "value")
        server.freeze()
        with client_of(server, timeout_s=0.3) as hasty, pytest.raises(redis.TimeoutError):
            hasty.get("key")
        server.thaw()
        assert client.get("key") == b"value"


@pytest.mark.parametrize("end", [RedisServer.stop, RedisServer.kill])
def test_an_ended_one_refuses_and_comes_back_empty_on_its_port(end: Callable[[RedisServer], None]) -> None:
    with RedisServer() as server, client_of(server) as client:
        client.set("key", "value")
        end(server)
        with pytest.raises(redis.ConnectionError):
            client.get("key")
        server.start()
        assert client.get("key") is None


def test_a_frozen_one_can_be_stopped() -> None:
    with RedisServer() as server:
        server.freeze()
        server.stop()  # an error if it does not end
