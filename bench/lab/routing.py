"""`kvasir bench routing`: what the turns of conversations wait for, by how the router chooses nodes.

Two prefill nodes and two decode nodes, started anew for each way of choosing; the same conversations, one turn at a
time, in the same random order: each turn sends the whole conversation so far, and a little more.
"""

import asyncio
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvasir.bench.command_line import positive
from kvasir.bench.lab.local_cluster import local_cluster
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.prompts import random_prompt
from kvasir.bench.markdown import table
from kvasir.bench.openai_client import Endpoint, ask, first_model, open_session
from kvasir.bench.workload import Prompt

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
    parser = lab_parser("routing", __doc__)
    add = parser.add_argument
    add("--conversations", type=positive(int), default=4, help="that go on side by side")
    add("--turns", type=positive(int), default=3, help="of each conversation")
    add("--first-len", type=positive(int), default=256, help="tokens of the first prompt")
    add("--next-len", type=positive(int), default=32, help="tokens that each further turn adds")
    add("--output-len", type=positive(int), default=16, help="tokens of each answer")
    add("--url", help="of one that runs already, with a tokenizer as the built-in model's (default: three are started)")
    options = parser.parse_args(argv)
    shape = Shape(options.conversations, options.turns, options.first_len, options.next_len, options.output_len)
    quiet, turns = Quiet(), {}
    if options.url:
        turns[options.url] = asyncio.run(converse(options.url, shape))
    else:
        for name, router_options in SETUPS.items():
            quiet.look()
            turns[name] = measure(name, router_options, shape)
    write_page(options.output, "routing.md", as_markdown(quiet.about_machine(), shape, turns))
    return 0


def measure(name: str, router_options: Sequence[str], shape: Shape) -> list[Turn]:
    options = ["--prefill", "2", "--decode", "2", "--kv-cache-memory", "400MiB"]
    for option in router_options:
        options += ["--router-options", option]
    with local_cluster(name, options) as cluster:
        asyncio.run(converse(cluster.url, shape, warms_up=True))
        return asyncio.run(converse(cluster.url, shape))


async def converse(url: str, shape: Shape, *, warms_up: bool = False) -> list[Turn]:
    """`warms_up`: others beforehand, one on each node, so that nothing is done for the first time."""
    rng = random.Random("others" if warms_up else "conversations")
    count, num_turns = (2, 1) if warms_up else (shape.num_conversations, shape.num_turns)
    conversations = [random_prompt(rng, shape.first_len) for _ in range(count)]
    turns = []
    async with open_session() as session:
        extra_body = {"temperature": 0, "return_token_ids": True}
        model = await first_model(session, url, {})
        endpoint = Endpoint(base_url=url, model=model, extra_body=extra_body, ignore_eos=True)
        for number in range(num_turns):
            for conversation in rng.sample(conversations, count):
                if number:
                    conversation += random_prompt(rng, shape.next_len)
                prompt = Prompt(content=tuple(conversation), num_output_tokens=shape.output_len)
                outcome = await ask(session, endpoint, prompt)
                if outcome.timeline is None or len(outcome.token_ids) != shape.output_len:
                    raise ValueError(outcome.error or f"{len(outcome.token_ids)} tokens came, not {shape.output_len}")
                turns.append(Turn(number, outcome.timeline.ttft_s, len(conversation), outcome.num_cached_tokens))
                conversation += outcome.token_ids
                await asyncio.sleep(_TOLD_AFTER_S)
    return turns


def as_markdown(about: Mapping[str, object], shape: Shape, turns: Mapping[str, Sequence[Turn]]) -> str:
    header = "policy | TTFT ms, first turns (median) | later turns (median) | later turns (longest) | "
    header += "of later prompts cached"
    lines = [
        f"2 prefill nodes and 2 decode nodes over tcp, the built-in model; {shape.num_conversations} conversations of "
        f"{shape.num_turns} turns, one request at a time, in random order.",
        f"A first prompt has {shape.first_len} tokens, an answer {shape.output_len}, and each further turn adds "
        f"{shape.next_len}. TTFT as the client sees it.",
        "",
        *table(header, [_row(name, own) for name, own in turns.items()]),
    ]
    return as_page("Where the turns of conversations go", about, lines)


def _row(name: str, turns: Sequence[Turn]) -> list[str]:
    first = f"{statistics.median(1e3 * turn.ttft_s for turn in turns if turn.number == 0):.0f}"
    later = [turn for turn in turns if turn.number > 0]
    if not later:
        return [name, first, "-", "-", "-"]
    waits_ms = [1e3 * turn.ttft_s for turn in later]
    share = sum(turn.num_cached_tokens for turn in later) / sum(turn.num_prompt_tokens for turn in later)
    return [name, first, f"{statistics.median(waits_ms):.0f}", f"{max(waits_ms):.0f}", f"{share:.0%}"]
