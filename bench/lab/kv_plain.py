"""Plain ways to move the same bytes, written by hand: `python -m kvasir.bench.lab.kv_plain send|receive JSON`.

{"way", "num_blocks", "block_bytes", "url", "path"}; the receiver copies into memory that has been touched. No header,
no checksum, no leases: what the transport alone can do.
"""

import json
import sys
import threading

import zmq

from kvasir.bench.lab.kv_plain_files import Files, KeptMappedFile, NewMappedFile
from kvasir.bench.lab.kv_plain_redis import RedisClient, RedisPipeline, RedisSocket
from kvasir.bench.lab.kv_way import Way, run_way


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


WAYS: dict[str, type[Way]] = {
    "nothing": Way,
    "zmq_push": ZmqPush,
    "zmq_push_unbounded": ZmqPushUnbounded,
    "zmq_pull": ZmqPull,
    "redis_client": RedisClient,
    "redis_pipeline": RedisPipeline,
    "redis_socket": RedisSocket,
    "kept_mapped_file": KeptMappedFile,
    "new_mapped_file": NewMappedFile,
    "files": Files,
}


if __name__ == "__main__":
    run_way(WAYS, sys.argv[1], json.loads(sys.argv[2]))
