"""A node in a process of its own, to be killed or frozen: `python -m <this module> ROLE JSON`.

send    {"settings", "num_blocks"}               publishes; prints the ticket's endpoint; stays
ask     {"settings", "num_blocks", "address"}    asks for all, reads next to nothing, prints a line, freezes itself
"""

import asyncio
import json
import os
import signal
import sys
from typing import Any

import zmq

from kvasir.engine.blocks import BlockId, KVLayout
from kvasir.kv_connector.base import BlockKey, KVBlock, Ticket, TransferId
from kvasir.kv_connector.settings import ConnectorSettings
from kvasir.kv_connector.tcp import protocol
from kvasir.kv_connector.testing import open_node

# 2 MiB a block: what is in flight is more than the kernel's buffers hold.
HUGE = KVLayout(num_layers=32, num_kv_heads=8, total_kv_heads=8, head_dim=64, block_size=16, dtype="float32")


def keys_of(num_blocks: int) -> list[BlockKey]:
    return [BlockKey(index.to_bytes(32, "little")) for index in range(num_blocks)]


async def send(settings: ConnectorSettings, task: Any) -> None:
    async with open_node(settings, HUGE, seed=1, num_blocks=task["num_blocks"]) as node:
        ticket = Ticket(transfer_id=TransferId("t"), connector="tcp")
        outgoing = [KVBlock(i, key, BlockId(i), 16) for i, key in enumerate(keys_of(task["num_blocks"]))]
        await node.sender.publish(ticket, outgoing)
        print(node.connector.endpoint, flush=True)
        await asyncio.sleep(120)


async def ask(settings: ConnectorSettings, task: Any) -> None:
    keys = protocol.keys_of(settings.secret)
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.DEALER)
    socket.set(zmq.RCVHWM, 1)
    socket.set(zmq.PLAIN_USERNAME, protocol.USER)
    socket.set(zmq.PLAIN_PASSWORD, keys.password)
    socket.connect(f"tcp://{task['address']}")
    nonce = bytes(protocol.NONCE_BYTES)
    socket.send(protocol.hello(nonce))
    sender_nonce = socket.recv()[1 : 1 + protocol.NONCE_BYTES]
    socket.send(protocol.ANSWER + nonce + keys.proof(protocol.RECEIVER, nonce, sender_nonce))
    assert socket.recv() == protocol.WELCOME
    for index, key in enumerate(keys_of(task["num_blocks"])):
        socket.send(protocol.fetch(index, TransferId("t"), [key]))
    socket.recv_multipart()
    print("landed", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)


if __name__ == "__main__":
    argument = json.loads(sys.argv[2])
    asyncio.run({"send": send, "ask": ask}[sys.argv[1]](ConnectorSettings(**argument["settings"]), argument))
