"""`kvasir bench lab`: this suite against transformers on this machine, in one run.

Contenders take turns within every round, so that whatever else the machine does hits all of them; reported are
medians over the rounds and their ratios. Written to a folder as JSON and as a table.
"""

import random
import statistics
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from pathlib import Path

from kvasir.bench.command_line import positive
from kvasir.bench.lab.cluster_cases import Figure, hop_figures, transfer_figures
from kvasir.bench.lab.contenders import CASES, Case, Contender, EngineContender, TransformersContender
from kvasir.bench.lab.local_cluster import ClusterContender, local_cluster
from kvasir.bench.lab.machine import about_machine, let_threads_sleep
from kvasir.bench.lab.page import as_page, keep, lab_parser
from kvasir.bench.lab.prompts import random_prompt
from kvasir.bench.lab.rounds import in_turns
from kvasir.bench.markdown import table
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.common.machine import usable_cpus

# name -> {contender -> one value a round}
Samples = dict[str, dict[str, list[float]]]


def main(argv: list[str]) -> int:
    parser = lab_parser("lab", __doc__)
    parser.add_argument("--rounds", type=positive(int), default=5, help="measurements of each number")
    options = parser.parse_args(argv)
    let_threads_sleep()
    model = prepare_builtin_model()
    num_cores = len(usable_cpus())
    shared = ["--no-pin-cores", "--kv-cache-memory", "1GiB"]
    both = [f"--{role}-options=threads={num_cores}" for role in ("prefill", "decode")]
    placements = {"cluster, own cores": ["--kv-cache-memory", "1GiB"], "cluster, shared cores": [*shared, *both]}
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(local_cluster(name, extra, has_metrics=True)) for name, extra in placements.items()
        ]
        contenders: list[Contender] = [TransformersContender(model), EngineContender(model), *clusters]
        samples = compare(contenders, options.rounds)
        figures = {cluster.name: cluster_figures(cluster) for cluster in clusters}
    write_results(options.output, samples, figures, options.rounds)
    return 0


def compare(contenders: Sequence[Contender], num_rounds: int) -> Samples:
    rng = random.Random(0)

    def measure(case: Case, contender: Contender) -> float:
        """With new prompts each time: a prefix cache must not help."""
        return case.measure(contender, [random_prompt(rng, length) for length in case.prompt_lens])

    works = {(case, one.name): partial(measure, case, one) for case in CASES for one in contenders}
    values = in_turns(
        works, num_rounds, describe=lambda key, value: f"{key[0].name}, {key[1]}: {value:.1f} {key[0].unit}"
    )
    return {case.name: {one.name: values[case, one.name] for one in contenders} for case in CASES}


def cluster_figures(cluster: ClusterContender) -> list[Figure]:
    rng = random.Random(1)
    return [*hop_figures(cluster, rng), *transfer_figures(cluster, rng)]


def write_results(folder: Path, samples: Samples, figures: Mapping[str, Sequence[Figure]], num_rounds: int) -> None:
    packages = {name: version(name) for name in ("torch", "transformers", "numba")}
    about = about_machine() | packages | {"rounds": num_rounds}
    found = {
        "machine": about,
        "comparisons": samples,
        "cluster": {name: [asdict(figure) for figure in own] for name, own in figures.items()},
    }
    keep(folder, "serving", found, as_markdown(about, samples, figures))


def as_markdown(about: Mapping[str, object], samples: Samples, figures: Mapping[str, Sequence[Figure]]) -> str:
    rows = []
    for case in CASES:
        baseline = statistics.median(samples[case.name][TransformersContender.name])
        for name, values in samples[case.name].items():
            median = statistics.median(values)
            ratio = median / baseline if case.more_is_better else baseline / median
            numbers = f"{median:.1f} {case.unit}", f"{min(values):.1f}", f"{max(values):.1f}", f"{ratio:.2f}"
            rows.append([case.name, name, *numbers])
    in_cluster = [
        [same[0].name, *(f"{figure.value:.1f} {figure.unit}" for figure in same)]
        for same in zip(*figures.values(), strict=True)
    ]
    lines = [
        "Medians over the rounds, contenders taking turns. The ratio is to transformers; above 1 is better.",
        "The engine runs in one process on all cores, as transformers does; a cluster's nodes divide or share them.",
        "",
        *table("measured | contender | median | least | most | ratio", rows, num_texts=2),
        "",
        *table(" | ".join(["in a cluster, connector tcp", *figures]), in_cluster),
    ]
    return as_page("Serving the built-in model", about, lines)
