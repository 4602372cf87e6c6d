"""`kvasir bench lab`: this suite against transformers on this machine, in one run.

Contenders take turns within every round, so that whatever else the machine does hits all of them; reported are
medians over the rounds and their ratios. Written to a folder as JSON and as a table.
"""

import argparse
import json
import os
import platform
import random
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

from kvasir.bench.lab.cluster_cases import Figure, hop_figures, transfer_figures
from kvasir.bench.lab.contenders import CASES, Contender, EngineContender, TransformersContender
from kvasir.bench.lab.local_cluster import ClusterContender, local_cluster
from kvasir.cli.cores import usable_cpus
from kvasir.cli.model import prepare_builtin_model
from kvasir.cli.ports import free_ports

VOCABULARY = range(1000, 40_000)  # plain tokens of the built-in model

# name -> {contender -> one value a round}
Samples = dict[str, dict[str, list[float]]]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="kvasir bench lab", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each number (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    options = parser.parse_args(argv)
    # Threads that spin while they wait would slow down whoever's turn comes next. Read when torch is imported.
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    model = prepare_builtin_model()
    num_cores = len(usable_cpus())
    shared = ["--no-pin-cores", "--kv-cache-memory", "1GiB"]
    both = [f"--{role}-options=threads={num_cores}" for role in ("prefill", "decode")]
    placements = {"cluster, own cores": ["--kv-cache-memory", "1GiB"], "cluster, shared cores": [*shared, *both]}
    with ExitStack() as stack:
        clusters = [
            stack.enter_context(local_cluster(name, model, free_ports(3), extra)) for name, extra in placements.items()
        ]
        contenders: list[Contender] = [TransformersContender(model), EngineContender(model), *clusters]
        samples = compare(contenders, options.rounds)
        figures = {cluster.name: cluster_figures(cluster) for cluster in clusters}
    write_results(options.output, samples, figures, options.rounds)
    return 0


def compare(contenders: Sequence[Contender], num_rounds: int) -> Samples:
    """One round more than asked for: the first warms up and does not count."""
    rng = random.Random(0)
    samples: Samples = {case.name: {contender.name: [] for contender in contenders} for case in CASES}
    for round_number in range(num_rounds + 1):
        for case in CASES:
            for contender in contenders:
                # New prompts each time: a prefix cache must not help.
                prompts = [rng.choices(VOCABULARY, k=length) for length in case.prompt_lens]
                value = case.measure(contender, prompts)
                print(f"round {round_number}  {case.name}  {contender.name}: {value:.1f} {case.unit}", file=sys.stderr)
                if round_number > 0:
                    samples[case.name][contender.name].append(value)
    return samples


def cluster_figures(cluster: ClusterContender) -> list[Figure]:
    rng = random.Random(1)
    return [*hop_figures(cluster, VOCABULARY, rng), *transfer_figures(cluster, VOCABULARY, rng)]


def machine() -> dict[str, Any]:
    cpus = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    packages = {name: version(name) for name in ("torch", "transformers", "numba")}
    return {
        "date": date.today().isoformat(),
        "cpu": cpus[0].partition(":")[2].strip() if cpus else platform.processor(),
        "cores": len(usable_cpus()),
        "load_at_end": os.getloadavg()[0],
        "python": platform.python_version(),
        **packages,
    }


def write_results(folder: Path, samples: Samples, figures: dict[str, list[Figure]], num_rounds: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    about = machine() | {"rounds": num_rounds}
    everything = {
        "machine": about,
        "comparisons": samples,
        "cluster": {name: [asdict(figure) for figure in found] for name, found in figures.items()},
    }
    (folder / "serving.json").write_text(json.dumps(everything, indent=2) + "\n")
    text = as_markdown(about, samples, figures)
    (folder / "serving.md").write_text(text)
    print(text)


def as_markdown(about: dict[str, Any], samples: Samples, figures: dict[str, list[Figure]]) -> str:
    lines = ["# Serving the built-in model", "", ", ".join(f"{name} {value}" for name, value in about.items()), ""]
    lines += [
        "Medians over the rounds, contenders taking turns. The ratio is to transformers; above 1 is better.",
        "The engine runs in one process on all cores, as transformers does; a cluster's nodes divide or share them.",
        "",
        "| measured | contender | median | least | most | ratio |",
        "|---|---|---:|---:|---:|---:|",
    ]
    for case in CASES:
        baseline = statistics.median(samples[case.name][TransformersContender.name])
        for name, values in samples[case.name].items():
            median = statistics.median(values)
            ratio = median / baseline if case.more_is_better else baseline / median
            numbers = f"{median:.1f} {case.unit} | {min(values):.1f} | {max(values):.1f} | {ratio:.2f}"
            lines.append(f"| {case.name} | {name} | {numbers} |")
    names = list(figures)
    lines += ["", "| in a cluster, connector tcp | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for row in zip(*figures.values(), strict=True):
        lines.append(f"| {row[0].name} | " + " | ".join(f"{figure.value:.1f} {figure.unit}" for figure in row) + " |")
    return "\n".join([*lines, ""])
