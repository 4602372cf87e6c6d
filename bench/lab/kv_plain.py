"""Plain ways to move the same bytes, written by hand: `python -m kvasir.bench.lab.kv_plain send|receive JSON`.

{"way", "num_blocks", "block_bytes", "url", "path"}; the receiver copies into memory that has been touched. No header,
no checksum, no leases: what the transport alone can do.
"""

import json
import mmap
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import redis
import zmq
from redis._parsers.encoders import Encoder
from redis.connection import PythonRespSerializer

from kvasir.bench.lab.kv_pipe import Answer, Teller, checksum, serve


class Pool:
    """Blocks side by side, in memory that is there."""

    def __init__(self, task: dict[str, Any]) -> None:
        self.num_blocks: int = task["num_blocks"]
        self.block_bytes: int = task["block_bytes"]
        self.memory = memoryview(bytearray(self.num_blocks * self.block_bytes))
        self.clear()

    def block(self, index: int) -> memoryview:
        return self.memory[index * self.block_bytes : (index + 1) * self.block_bytes]

    def clear(self) -> Answer:
        self.memory[:] = bytes(self.memory.nbytes)
        return {}

    def checksum(self) -> Answer:
        return {"checksum": checksum(self.memory)}

    def fill(self) -> int:
        self.memory[:] = os.urandom(self.memory.nbytes)
        return checksum(self.memory)


def timed(what: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    what()
    return time.perf_counter() - start_s


class Way:
    """One way to move a pool: all that is done before `take` is called is `offer`."""

    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        self.pool = pool

    def listen(self) -> str:
        """The sender gets ready, and says where."""
        return ""

    def connect(self, address: str) -> None: ...
    def offer(self) -> None: ...
    def take(self) -> None: ...
    def discard(self) -> None: ...


class ZmqPush(Way):
    """At a word, the sender sends all blocks, as fast as the socket takes them."""

    high_water_mark = 8

    def listen(self) -> str:
        router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        router.set(zmq.SNDHWM, self.high_water_mark)
        router.set(zmq.ROUTER_MANDATORY, 1)  # wait where the mark is reached
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def run() -> None:
            while True:
                peer, _ = router.recv_multipart()
                for index in range(self.pool.num_blocks):
                    router.send_multipart([peer, self.pool.block(index)], copy=False)

        threading.Thread(target=run, daemon=True).start()
        return f"tcp://127.0.0.1:{port}"

    def connect(self, address: str) -> None:
        self._dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._dealer.set(zmq.RCVHWM, self.high_water_mark)
        self._dealer.connect(address)

    def take(self) -> None:
        self._dealer.send(b"go")
        for index in range(self.pool.num_blocks):
            self.pool.block(index)[:] = self._dealer.recv(copy=False).buffer


class ZmqPushUnbounded(ZmqPush):
    high_water_mark = 0


class ZmqPull(ZmqPush):
    """The receiver asks for each block, and keeps a few asked for."""

    num_ahead = 8

    def listen(self) -> str:
        router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        port = router.bind_to_random_port("tcp://127.0.0.1")

        def run() -> None:
            while True:
                peer, index = router.recv_multipart()
                router.send_multipart([peer, self.pool.block(int(index))], copy=False)

        threading.Thread(target=run, daemon=True).start()
        return f"tcp://127.0.0.1:{port}"

    def take(self) -> None:
        num_blocks = self.pool.num_blocks
        for index in range(min(self.num_ahead, num_blocks)):
            self._dealer.send(b"%d" % index)
        for index in range(num_blocks):
            frame = self._dealer.recv(copy=False)
            if index + self.num_ahead < num_blocks:
                self._dealer.send(b"%d" % (index + self.num_ahead))
            self.pool.block(index)[:] = frame.buffer


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


class MappedFile(Way):
    """Copied into a file that both have mapped, and out of it."""

    def __init__(self, task: dict[str, Any], pool: Pool) -> None:
        super().__init__(task, pool)
        self._path = Path(task["path"]) / "plain"
        self._mapped: mmap.mmap | None = None

    def listen(self) -> str:
        self._path.write_bytes(bytes(self.pool.memory.nbytes))
        self.connect("")
        return ""

    def connect(self, address: str) -> None:
        with self._path.open("r+b") as file:
            self._mapped = mmap.mmap(file.fileno(), 0)
        checksum(memoryview(self._mapped))  # every page is there

    def offer(self) -> None:
        assert self._mapped is not None, "mapped when ready"
        memoryview(self._mapped)[:] = self.pool.memory

    def take(self) -> None:
        assert self._mapped is not None, "mapped when ready"
        self.pool.memory[:] = memoryview(self._mapped)


WAYS: dict[str, type[Way]] = {
    "nothing": Way,
    "zmq_push": ZmqPush,
    "zmq_push_unbounded": ZmqPushUnbounded,
    "zmq_pull": ZmqPull,
    "redis_client": RedisClient,
    "redis_pipeline": RedisPipeline,
    "redis_socket": RedisSocket,
    "mapped_file": MappedFile,
}


def main(role: str, task: dict[str, Any]) -> None:
    teller, pool = Teller(), Pool(task)
    way = WAYS[task["way"]](task, pool)

    def offer() -> Answer:
        return {"s": timed(way.offer)}

    def take() -> Answer:
        return {"s": timed(way.take), "missing": 0}

    def discard() -> Answer:
        way.discard()
        return {}

    if role == "send":
        teller.tell(checksum=pool.fill(), address=way.listen())
    else:
        way.connect(task["address"])
        teller.tell(checksum=0)
    serve(teller, {"offer": offer, "take": take, "clear": pool.clear, "checksum": pool.checksum, "discard": discard})


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
