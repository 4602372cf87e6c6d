"""The live picture of the cluster: what each process of the router sees, and all of it together."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from kvasir.router.overview import Picture
from kvasir.router.pool import Node, NodePool
from kvasir.router.recent import Recent


def take_picture(pool: NodePool, recent: Recent, num_waiting: Callable[[], int], answer: str) -> Picture:
    """Of one process; JSON. `served_by`: the nodes that gave the tokens of `answer`."""
    return {
        "num_waiting": num_waiting(),
        "nodes": [_describe(node) for node in pool.nodes()],
        "slices": recent.slices(),
        "served_by": recent.served_by(answer) if answer else [],
    }


def whole_picture(pictures: Iterable[Picture], recent: Recent) -> dict[str, Any]:
    """Each process has a session with each node, and knows of the others' requests there by the node's reports."""
    pictures = list(pictures)
    nodes: dict[str, dict[str, Any]] = {}
    for node in (node for picture in pictures for node in picture["nodes"]):
        known = nodes.setdefault(node["address"], node)
        for name in ("num_seats_taken", "num_queued_tokens"):
            known[name] = max(known[name], node[name])
        known["num_free_blocks"] = min(known["num_free_blocks"], node["num_free_blocks"])
        known["is_draining"] |= node["is_draining"]
    return {
        "num_waiting": sum(picture["num_waiting"] for picture in pictures),
        "nodes": list(nodes.values()),
        "latencies": [asdict(one) for one in recent.summaries([picture["slices"] for picture in pictures])],
        "served_by": next((picture["served_by"] for picture in pictures if picture["served_by"]), []),
    }


def _describe(node: Node) -> dict[str, Any]:
    info, load, view = node.info, node.load, node.view()
    return {
        "address": info.address,
        "role": info.role.value,
        "connector": info.connector,
        "is_draining": node.is_draining,
        "num_seats_taken": view.num_seats_taken,
        "max_num_seqs": info.max_num_seqs,
        "num_running": load.num_running,
        "num_waiting": load.num_waiting,
        "num_queued_tokens": view.num_queued_tokens,
        "num_free_blocks": view.num_free_blocks,
        "num_total_blocks": info.num_total_blocks,
        "num_leased_blocks": load.num_leased_blocks,
        "prefill_tokens_per_s": load.prefill_tokens_per_s,
        "decode_step_s": load.decode_step_s,
    }
