"""`kvasir bench disaggregation`: the same cores as a prefill node and a decode node, or as one node that does both.

The same requests at the same (Poisson) times to each set-up in turn, at rising rates. A service level is a multiple of
what the colocated node needs for one request at a time. Points are added to those of earlier runs in the folder.
"""

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvasir.bench.lab.disaggregation_report import COLOCATED, DISAGGREGATED, Point, Unloaded, as_markdown, draw
from kvasir.bench.lab.kv_report import Quiet, machine
from kvasir.bench.lab.local_cluster import local_cluster
from kvasir.bench.load_generator import LoadResult, run_load
from kvasir.bench.openai_client import Endpoint, Outcome, ask, first_model
from kvasir.bench.report import refuse_failures, samples_s, timelines_of
from kvasir.bench.serve import open_session
from kvasir.bench.timeline import percentile
from kvasir.bench.workload import Prompt, arrival_times_s
from kvasir.cli.model import prepare_builtin_model
from kvasir.cli.ports import free_ports

VOCABULARY = range(1000, 40_000)  # plain tokens of the built-in model
SETUPS = {COLOCATED: ["--prefill", "0", "--decode", "1"], DISAGGREGATED: ["--prefill", "1", "--decode", "1"]}
_WARM_UP = (1, 2, 4, 8, 12, 16)  # requests at once: a batch of a new size is prepared when it first comes
_NUM_UNLOADED = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """Of all requests."""

    input_len: int
    output_len: int

    def prompts(self, count: int, rng: random.Random) -> list[Prompt]:
        return [
            Prompt(content=tuple(rng.choices(VOCABULARY, k=self.input_len)), num_output_tokens=self.output_len)
            for _ in range(count)
        ]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvasir bench disaggregation", description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--rates", type=_rates, default=(0.4, 0.8, 1.2, 1.6), help="requests a second, with commas")
    add("--seconds", type=float, default=40.0, help="how long requests are sent at each rate (default: %(default)s)")
    add("--input-len", type=int, default=256, help="(default: %(default)s)")
    add("--output-len", type=int, default=128, help="(default: %(default)s)")
    add("--seed", type=int, default=0, help="of prompts and times (default: %(default)s)")
    add("--colocated", metavar="URL", help="one that runs already, warmed up; started by default")
    add("--disaggregated", metavar="URL", help="one that runs already, warmed up; started by default")
    add("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    options = parser.parse_args(argv)
    shape, quiet = Shape(options.input_len, options.output_len), Quiet()
    file = options.output / "disaggregation.json"
    unloaded, points, quiet.shares = read_earlier(file, shape)
    with ExitStack() as stack:
        urls = {COLOCATED: options.colocated, DISAGGREGATED: options.disaggregated}
        for name, url in urls.items():
            urls[name] = url or stack.enter_context(_started(name, shape))
        # The same for both set-ups, and new each time: a server that ran before may still hold the old ones' blocks.
        seed = f"{options.seed} {len(points)}"
        for name, url in urls.items():
            quiet.look()
            unloaded.append(measure_unloaded(name, url, shape, f"{seed} unloaded"))
        for rate in options.rates:
            for name, url in urls.items():
                quiet.look()
                points.append(measure(name, url, rate, shape, options.seconds, f"{seed} {rate}"))
                print(points[-1].line(), file=sys.stderr)
    about = machine() | {"busy_with_other_things": str(quiet)}
    write(file, about, quiet, shape, unloaded, points)
    return 0


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(word) for word in text.split(","))


@contextmanager
def _started(name: str, shape: Shape) -> Iterator[str]:
    options = [*SETUPS[name], "--kv-cache-memory", "1GiB"]
    with local_cluster(name, prepare_builtin_model(), free_ports(3), options) as cluster:
        warm_up(cluster.url, shape)
        yield cluster.url


def warm_up(url: str, shape: Shape) -> None:
    for count in _WARM_UP:
        load = asyncio.run(_load(url, shape.prompts(count, random.Random(f"warm up {count}")), [0.0] * count, None))
        refuse_failures(load)


def measure_unloaded(name: str, url: str, shape: Shape, seed: str) -> Unloaded:
    """One request after the other."""
    prompts = shape.prompts(_NUM_UNLOADED, random.Random(seed))
    load = asyncio.run(_load(url, prompts, [0.0] * len(prompts), max_concurrency=1))
    refuse_failures(load)
    ttft_s, tpot_s = (statistics.median(samples_s(load, metric)) for metric in ("ttft", "tpot"))
    return Unloaded(setup=name, ttft_s=ttft_s, tpot_s=tpot_s)


def measure(name: str, url: str, rate: float, shape: Shape, seconds: float, seed: str) -> Point:
    rng = random.Random(seed)
    prompts = shape.prompts(max(1, round(rate * seconds)), rng)
    load = asyncio.run(_load(url, prompts, arrival_times_s(len(prompts), rate, 1.0, rng), None))
    refuse_failures(load)
    itls_s = samples_s(load, "itl")
    return Point(
        setup=name,
        rate=rate,
        itl_p50_s=percentile(itls_s, 50),
        itl_p99_s=percentile(itls_s, 99),
        requests=[(line.ttft_s, line.tpot_s or 0.0) for line in timelines_of(load)],
    )


async def _load(
    url: str, prompts: Sequence[Prompt], arrivals_s: Sequence[float], max_concurrency: int | None
) -> LoadResult:
    async with open_session() as session:
        model = await first_model(session, url, {})
        endpoint = Endpoint(base_url=url, model=model, extra_body={"temperature": 0}, ignore_eos=True)

        async def send(prompt: Prompt) -> Outcome:
            return await ask(session, endpoint, prompt)

        return await run_load(prompts, arrivals_s, send, max_concurrency)


def read_earlier(file: Path, shape: Shape) -> tuple[list[Unloaded], list[Point], list[float]]:
    """What other runs found for requests of this shape; and how busy the machine was with other things."""
    if not file.exists():
        return [], [], []
    earlier: dict[str, Any] = json.loads(file.read_text())
    if earlier["shape"] != asdict(shape):
        return [], [], []
    unloaded = [Unloaded(**one) for one in earlier["unloaded"]]
    return unloaded, [Point.from_json(one) for one in earlier["points"]], earlier.get("busy", [])


def write(
    file: Path, about: dict[str, Any], quiet: Quiet, shape: Shape, unloaded: Sequence[Unloaded], points: Sequence[Point]
) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    everything = {
        "machine": about,
        "busy": quiet.shares,
        "shape": asdict(shape),
        "unloaded": [asdict(one) for one in unloaded],
        "points": [asdict(one) for one in points],
    }
    file.write_text(json.dumps(everything, indent=1) + "\n")
    text = as_markdown(about, asdict(shape), unloaded, points)
    file.with_suffix(".md").write_text(text)
    draw(file.with_suffix(".png"), unloaded, points)
    print(text)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
