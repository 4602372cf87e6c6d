"""`kvasir bench routing`: what the turns of conversations wait for, by how the router chooses nodes.

Two prefill nodes and two decode nodes, started anew for each way of choosing; the same conversations, one turn at a
time, in the same random order: each turn sends the whole conversation so far, and a little more.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from kvasir.bench.lab.kv_report import Quiet, machine
from kvasir.bench.lab.local_cluster import local_cluster
from kvasir.bench.openai_client import first_model
from kvasir.bench.serve import open_session
from kvasir.cli.model import prepare_builtin_model
from kvasir.cli.ports import free_ports

VOCABULARY = range(1000, 40_000)  # plain tokens of the built-in model
APART = "prefix_aware, tiers apart"
SETUPS = {
    "round_robin": ["policy=round_robin", "max_local_prefill_tokens=0"],
    APART: ["policy=prefix_aware", "max_local_prefill_tokens=0"],
    "prefix_aware": ["policy=prefix_aware"],
}
_TOLD_AFTER_S = 0.3  # by then a router knows what a turn has left in the caches; a reader takes longer


@dataclass(frozen=True, slots=True)
class Turn:
    """One request: which of its conversation, how long it waited for its first token, and what was cached."""

    number: int
    ttft_s: float
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class Shape:
    num_conversations: int
    num_turns: int
    first_len: int
    next_len: int
    output_len: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvasir bench routing", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--conversations", type=int, default=4, help="(default: %(default)s)")
    add("--turns", type=int, default=3, help="of each (default: %(default)s)")
    add("--first-len", type=int, default=256, help="tokens of the first prompt (default: %(default)s)")
    add("--next-len", type=int, default=32, help="tokens that each further turn adds (default: %(default)s)")
    add("--output-len", type=int, default=16, help="tokens of each answer (default: %(default)s)")
    add("--url", help="one that runs already, by a name of its own; three are started by default")
    add("--output", type=Path, default=Path("bench/results/routing.md"), help="file (default: %(default)s)")
    options = parser.parse_args(argv)
    shape = Shape(options.conversations, options.turns, options.first_len, options.next_len, options.output_len)
    quiet, turns = Quiet(), {}
    if options.url:
        turns[options.url] = asyncio.run(converse(options.url, shape))
    else:
        for name, router_options in SETUPS.items():
            quiet.look()
            turns[name] = measure(name, router_options, shape)
    page = as_markdown(machine() | {"busy_with_other_things": str(quiet)}, shape, turns)
    options.output.write_text(page)
    print(page)
    return 0


def measure(name: str, router_options: Sequence[str], shape: Shape) -> list[Turn]:
    options = ["--prefill", "2", "--decode", "2", "--kv-cache-memory", "400MiB"]
    for option in router_options:
        options += ["--router-options", option]
    (port,) = free_ports(1)
    with local_cluster(name, prepare_builtin_model(), (port, 0, 0), options) as cluster:
        asyncio.run(converse(cluster.url, shape, warms_up=True))
        return asyncio.run(converse(cluster.url, shape))


async def converse(url: str, shape: Shape, *, warms_up: bool = False) -> list[Turn]:
    """`warms_up`: others beforehand, one on each node, so that nothing is done for the first time."""
    rng = random.Random("others" if warms_up else "conversations")
    count, num_turns = (2, 1) if warms_up else (shape.num_conversations, shape.num_turns)
    conversations = [rng.choices(VOCABULARY, k=shape.first_len) for _ in range(count)]
    turns = []
    async with open_session() as session:
        model = await first_model(session, url, {})
        for number in range(num_turns):
            for conversation in rng.sample(conversations, count):
                if number:
                    conversation += rng.choices(VOCABULARY, k=shape.next_len)
                turn, answer = await ask(session, url, model, number, conversation, shape.output_len)
                conversation += answer
                turns.append(turn)
                await asyncio.sleep(_TOLD_AFTER_S)
    return turns


async def ask(
    session: aiohttp.ClientSession, url: str, model: str, number: int, token_ids: Sequence[int], output_len: int
) -> tuple[Turn, list[int]]:
    body = {"model": model, "prompt": list(token_ids), "max_tokens": output_len, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    sent_s, ttft_s, answer, cached = time.perf_counter(), 0.0, list[int](), 0
    async with session.post(f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line.removeprefix(b"data: "))
            for choice in chunk["choices"]:
                ttft_s = ttft_s or time.perf_counter() - sent_s
                answer += choice.get("token_ids") or ()
            if chunk.get("usage"):
                cached = chunk["usage"]["prompt_tokens_details"]["cached_tokens"]
    if len(answer) != output_len:
        raise RuntimeError(f"{len(answer)} tokens came, not {output_len}")
    return Turn(number, ttft_s, len(token_ids), cached), answer


def as_markdown(about: dict[str, object], shape: Shape, turns: dict[str, list[Turn]]) -> str:
    lines = [
        "# Where the turns of conversations go",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        f"2 prefill nodes and 2 decode nodes over tcp, the built-in model; {shape.num_conversations} conversations of "
        f"{shape.num_turns} turns, one request at a time, in random order.",
        f"A first prompt has {shape.first_len} tokens, an answer {shape.output_len}, and each further turn adds "
        f"{shape.next_len}. TTFT as the client sees it.",
        "",
        "| policy | TTFT ms, first turns (median) | later turns (median) | later turns (longest) "
        "| of later prompts cached |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, own in turns.items():
        first = [turn.ttft_s * 1e3 for turn in own if turn.number == 0]
        later = [turn for turn in own if turn.number > 0]
        waits = [turn.ttft_s * 1e3 for turn in later]
        share = sum(turn.num_cached_tokens for turn in later) / sum(turn.num_prompt_tokens for turn in later)
        lines.append(
            f"| {name} | {statistics.median(first):.0f} | {statistics.median(waits):.0f} | {max(waits):.0f} "
            f"| {share:.0%} |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
