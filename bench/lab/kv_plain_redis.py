"""Plain ways through a Redis server."""

import socket
from typing import Any

import redis
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer

from kvasir.bench.lab.kv_way import Pool, Way


class RedisClient(Way):
    """redis-py, one SET and one GET a block, packed in Python: the default packer is slow for large values.

    Every round has new keys, as every block of a conversation has: a server makes room for a new value, and less so
    for one that takes an old one's place.
    """

    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        super().__init__(task, pool)
        encode = Encoder("utf-8", "strict", False).encode  # type: ignore[no-untyped-call]
        packer = PythonRespSerializer(6000, encode)
        self._client = redis.Redis.from_url(task["url"], command_packer=packer)
        self._round = 0  # of this side

    def name(self, index: int) -> str:
        return f"plain-{type(self).__name__}-{self._round}-{index}"

    def offer(self) -> None:
        self._round += 1
        self.put_all()

    def take(self) -> None:
        self._round += 1
        self.get_all()

    def discard(self) -> None:
        self._client.unlink(*[self.name(index) for index in range(self.pool.num_blocks)])

    def put_all(self) -> None:
        for index in range(self.pool.num_blocks):
            self._client.set(self.name(index), self.pool.block(index))

    def get_all(self) -> None:
        for index in range(self.pool.num_blocks):
            self._put(index, self._client.get(self.name(index)))

    def _put(self, index: int, value: Any) -> None:
        self.pool.block(index)[:] = value


class RedisPipeline(RedisClient):
    """redis-py, eight commands at once."""

    num_at_once = 8

    def put_all(self) -> None:
        for start in range(0, self.pool.num_blocks, self.num_at_once):
            pipeline = self._client.pipeline(transaction=False)
            for index in range(start, min(start + self.num_at_once, self.pool.num_blocks)):
                pipeline.set(self.name(index), self.pool.block(index))
            pipeline.execute()

    def get_all(self) -> None:
        for start in range(0, self.pool.num_blocks, self.num_at_once):
            pipeline = self._client.pipeline(transaction=False)
            for index in range(start, min(start + self.num_at_once, self.pool.num_blocks)):
                pipeline.get(self.name(index))
            for index, value in enumerate(pipeline.execute(), start):
                self._put(index, value)


class RedisSocket(RedisClient):
    """No client library: the protocol by hand on a socket, values received where they are wanted."""

    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        super().__init__(task, pool)
        arguments = self._client.connection_pool.connection_kwargs
        self._socket = socket.create_connection((arguments["host"], arguments["port"]))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def put_all(self) -> None:
        for index in range(self.pool.num_blocks):
            name, value = self.name(index).encode(), self.pool.block(index)
            head = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, value.nbytes)
            self._send_all([memoryview(head), value, memoryview(b"\r\n")])
            assert self._line() == b"+OK"

    def get_all(self) -> None:
        for index in range(self.pool.num_blocks):
            name = self.name(index).encode()
            self._socket.sendall(b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name))
            assert int(self._line()[1:]) == self.pool.block_bytes
            rest = self.pool.block(index)
            while rest:
                rest = rest[self._socket.recv_into(rest) :]
            assert self._socket.recv(2, socket.MSG_WAITALL) == b"\r\n"

    def _send_all(self, parts: list[memoryview]) -> None:
        while parts:
            num_sent = self._socket.sendmsg(parts)
            while parts and num_sent >= parts[0].nbytes:
                num_sent -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][num_sent:]

    def _line(self) -> bytes:
        line = b""
        while not line.endswith(b"\r\n"):
            line += self._socket.recv(1)
        return line[:-2]
