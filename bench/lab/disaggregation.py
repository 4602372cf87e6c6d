"""`kvasir bench disaggregation`: the same cores as a prefill node and a decode node, or as one node that does both.

The same requests at the same (Poisson) times to each set-up in turn, at rising rates. A service level is a multiple of
what the colocated node needs for one request at a time. Points are added to those of earlier runs in the folder.
"""

import random
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvasir.bench.command_line import positive, several
from kvasir.bench.lab.disaggregation_report import COLOCATED, DISAGGREGATED, Point, Unloaded, as_markdown, draw
from kvasir.bench.lab.greedy_load import as_prompt, greedy_load
from kvasir.bench.lab.local_cluster import local_cluster
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import keep, kept, lab_parser
from kvasir.bench.lab.prompts import random_prompt
from kvasir.bench.report import samples_s, timelines_of
from kvasir.bench.timeline import percentile
from kvasir.bench.workload import Prompt, arrival_times_s

SETUPS = {COLOCATED: ["--prefill", "0", "--decode", "1"], DISAGGREGATED: ["--prefill", "1", "--decode", "1"]}
_WARM_UP = (1, 2, 4, 8, 12, 16)  # requests at once: a batch of a new size is prepared when it first comes
_NUM_UNLOADED = 3


@dataclass(frozen=True, slots=True)
class Shape:
    """Of all requests."""

    input_len: int
    output_len: int

    def prompts(self, count: int, rng: random.Random) -> list[Prompt]:
        return [as_prompt(random_prompt(rng, self.input_len), self.output_len) for _ in range(count)]


def main(argv: list[str]) -> int:
    parser = lab_parser("disaggregation", __doc__)
    add = parser.add_argument
    rates = several(positive(float))
    add("--rates", type=rates, default=(0.4, 0.8, 1.2, 1.6), metavar="X,..", help="requests a second")
    add("--seconds", type=positive(float), default=40.0, help="how long requests are sent at each rate")
    add("--input-len", type=positive(int), default=256, help="tokens of each prompt")
    add("--output-len", type=positive(int), default=128, help="tokens of each answer")
    add("--seed", type=int, default=0, help="of prompts and times")
    for name in SETUPS:
        add(f"--{name}", metavar="URL", help="of one that runs already, warmed up (default: one is started)")
    options = parser.parse_args(argv)
    shape, quiet = Shape(options.input_len, options.output_len), Quiet()
    unloaded, points, quiet.shares = read_earlier(options.output, shape)
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
    write(options.output, quiet, shape, unloaded, points)
    return 0


@contextmanager
def _started(name: str, shape: Shape) -> Iterator[str]:
    with local_cluster(name, [*SETUPS[name], "--kv-cache-memory", "1GiB"]) as cluster:
        for count in _WARM_UP:
            greedy_load(cluster.url, shape.prompts(count, random.Random(f"warm up {count}")))
        yield cluster.url


def measure_unloaded(name: str, url: str, shape: Shape, seed: str) -> Unloaded:
    """One request after the other."""
    load = greedy_load(url, shape.prompts(_NUM_UNLOADED, random.Random(seed)), max_concurrency=1)
    ttft_s, tpot_s = (statistics.median(samples_s(load, metric)) for metric in ("ttft", "tpot"))
    return Unloaded(setup=name, ttft_s=ttft_s, tpot_s=tpot_s)


def measure(name: str, url: str, rate: float, shape: Shape, seconds: float, seed: str) -> Point:
    rng = random.Random(seed)
    prompts = shape.prompts(max(1, round(rate * seconds)), rng)
    load = greedy_load(url, prompts, arrival_times_s(len(prompts), rate, 1.0, rng))
    itls_s = samples_s(load, "itl")
    return Point(
        setup=name,
        rate=rate,
        itl_p50_s=percentile(itls_s, 50),
        itl_p99_s=percentile(itls_s, 99),
        requests=[(line.ttft_s, line.tpot_s or 0.0) for line in timelines_of(load)],
    )


def read_earlier(folder: Path, shape: Shape) -> tuple[list[Unloaded], list[Point], list[float]]:
    """What other runs found for requests of this shape; and how busy the machine was with other things."""
    earlier = kept(folder, "disaggregation")
    if earlier.get("shape") != asdict(shape):
        return [], [], []
    unloaded = [Unloaded(**one) for one in earlier["unloaded"]]
    return unloaded, [Point.from_json(one) for one in earlier["points"]], earlier.get("busy", [])


def write(folder: Path, quiet: Quiet, shape: Shape, unloaded: Sequence[Unloaded], points: Sequence[Point]) -> None:
    about = quiet.about_machine()
    found = {
        "machine": about,
        "busy": quiet.shares,
        "shape": asdict(shape),
        "unloaded": [asdict(one) for one in unloaded],
        "points": [asdict(one) for one in points],
    }
    keep(folder, "disaggregation", found, as_markdown(about, asdict(shape), unloaded, points))
    draw(folder / "disaggregation.png", unloaded, points)
