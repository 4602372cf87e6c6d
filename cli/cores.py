"""Who computes where: a machine's cores and memory divided among the nodes that share it."""

from collections.abc import Sequence
from dataclasses import dataclass

_MIB = 1 << 20
_GIB = 1 << 30
KV_SHARE = 0.5  # of the memory that the weights leave; the rest is for activations and for everybody else
MAX_KV_BYTES = 2 * _GIB  # by default, a node: more is asked for by name
MIN_KV_BYTES = 64 * _MIB


@dataclass(frozen=True, slots=True)
class CoreShare:
    """What one node gets: its compute threads, and the cores they stay on (none: any)."""

    num_threads: int
    cpus: tuple[int, ...] = ()


def divide_cores(cpus: Sequence[int], num_prefill: int, num_decode: int, pin: bool = True) -> list[CoreShare]:
    """Shares of the prefill nodes, then of the decode nodes. No core has two compute threads while cores last.

    What is left over goes to prefill first, for it is bound by computing, decode by memory.

        4 cores, 1 + 1  ->  2 threads on 0, 1    2 threads on 2, 3
        3 cores, 1 + 1  ->  2 threads on 0, 1    1 thread on 2
        2 cores, 1 + 2  ->  1 thread each, anywhere
    """
    num_nodes = num_prefill + num_decode
    if num_nodes > len(cpus):  # a node needs a thread, so here the system must take turns
        return [CoreShare(1)] * num_nodes
    each, left_over = divmod(len(cpus), num_nodes)
    shares: list[CoreShare] = []
    start = 0
    for index in range(num_nodes):
        end = start + each + (index < left_over)
        shares.append(CoreShare(end - start, tuple(cpus[start:end]) if pin else ()))
        start = end
    return shares


def divide_kv_memory(available_bytes: int, weights_bytes: int, num_nodes: int) -> int:
    """The bytes of KV cache for each node, when each also holds the weights."""
    spare_bytes = available_bytes - num_nodes * weights_bytes
    fair_bytes = int(spare_bytes * KV_SHARE) // max(1, num_nodes)
    return max(MIN_KV_BYTES, min(MAX_KV_BYTES, fair_bytes))
