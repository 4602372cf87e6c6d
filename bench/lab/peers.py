"""`kvasir bench peers`: this engine beside others on this machine, all with the same prompts, in turns.

A peer is whatever is installed here, in an environment of its own; none comes with us. It is an OpenAI endpoint
(NAME=http://...), or a command (NAME=COMMAND) with {workload} in it, which reads prompts from that file and prints a
line of JSON for each batch (`peer_command.py` says how), or with {concurrency} in it, which prints "<number> tokens/s".
Every round all contenders take their turn. What a run finds is added to what earlier runs in the folder found, and as
the prompts stay the same, so do the answers of transformers that all are compared with, once it has taken part: token
by token, but those of an endpoint as text.
"""

import argparse
import json
import random
import re
import shlex
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvasir.bench.command_line import positive, several
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import kept, lab_parser
from kvasir.bench.lab.peers_http import measure_endpoint, texts_of
from kvasir.bench.lab.peers_report import REFERENCE, Measurement, as_markdown
from kvasir.bench.lab.prompts import random_prompt

OURS = ("kvasir-fp32", "kvasir-fp16", "kvasir-int8", "transformers")
_RATE = re.compile(r"(\d+(?:\.\d+)?) *tok(?:en)?s?/s(?:ec)?\b")
_LONGEST_S = 600.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One batch for each concurrency: the same prompts in every run."""

    concurrency: tuple[int, ...]
    input_len: int
    num_tokens: int

    def batches(self) -> list[list[list[int]]]:
        return [self._batch(random.Random(count), count) for count in self.concurrency]

    def _batch(self, rng: random.Random, count: int) -> list[list[int]]:
        return [random_prompt(rng, self.input_len) for _ in range(count)]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    target: str  # a URL, or a command line

    def measure(self, workload: Workload) -> list[dict[str, Any]]:
        """One for each concurrency: tokens_per_s, and what else it says."""
        if self.target.startswith(("http://", "https://")):
            return [measure_endpoint(self.target, batch, workload.num_tokens) for batch in workload.batches()]
        if "{concurrency}" in self.target:
            return [self._one(count, workload) for count in workload.concurrency]
        with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
            json.dump({"num_tokens": workload.num_tokens, "batches": workload.batches()}, file)
            file.flush()
            output = run(self.target.replace("{workload}", file.name))
        lines = [json.loads(line) for line in output.splitlines() if line.startswith('{"concurrency"')]
        if [line["concurrency"] for line in lines] != list(workload.concurrency):
            raise RuntimeError(f"{self.name} did not answer for each concurrency:\n{output[-2000:]}")
        return lines

    def _one(self, count: int, workload: Workload) -> dict[str, Any]:
        values = {"concurrency": count, "input_len": workload.input_len, "output_len": workload.num_tokens}
        command = self.target
        for name, value in values.items():
            command = command.replace(f"{{{name}}}", str(value))
        rates = _RATE.findall(output := run(command))
        if not rates:
            raise RuntimeError(f"{self.name} printed no tokens/s:\n{output[-2000:]}")
        return {"concurrency": count, "tokens_per_s": float(rates[-1])}


def run(command: str) -> str:
    """Its stdout. How its threads wait is its own affair."""
    done = subprocess.run(shlex.split(command), capture_output=True, text=True, timeout=_LONGEST_S)
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return done.stdout


@dataclass(slots=True)
class Found:
    """All rounds so far, of one shape of requests."""

    shape: tuple[int, int]  # tokens in, tokens out
    measurements: list[Measurement] = field(default_factory=list)
    reference: dict[int, list[list[int]]] = field(default_factory=dict)  # answers of transformers, by concurrency
    busy: list[float] = field(default_factory=list)  # with other things: the machine's share, before each turn

    @classmethod
    def read(cls, folder: Path, shape: tuple[int, int]) -> "Found":
        """What other runs found for requests of this shape."""
        earlier = kept(folder, "peers")
        if tuple(earlier.get("shape", ())) != shape:
            return cls(shape)
        measurements = [Measurement(**one) for one in earlier["measurements"]]
        reference = {int(count): answers for count, answers in earlier["reference"].items()}
        return cls(shape, measurements, reference, earlier["busy"])

    def take_turn(self, peer: Peer, workload: Workload) -> None:
        for said in peer.measure(workload):
            count = said["concurrency"]
            if peer.name == REFERENCE:
                self.reference[count] = said.get("token_ids", [])
            reference = self.reference.get(count, [])
            measurement = Measurement(
                peer=peer.name,
                round=sum((one.peer, one.concurrency) == (peer.name, count) for one in self.measurements),
                concurrency=count,
                tokens_per_s=said["tokens_per_s"],
                decode_tokens_per_s=said.get("decode_tokens_per_s"),
            )
            if "texts" in said:
                measurement.compare(said["texts"], texts_of(reference))
            else:
                measurement.compare(said.get("token_ids", []), reference)
            self.measurements.append(measurement)
            print(measurement.line(), file=sys.stderr)


def main(argv: list[str]) -> int:
    parser = lab_parser("peers", __doc__, "[NAME=URL|COMMAND ...]")
    add = parser.add_argument
    add("peers", nargs="*", type=_peer, metavar="NAME=URL|COMMAND", help="besides our own and transformers")
    add("--ours", nargs="*", default=list(OURS), metavar="NAME", help="what runs from this environment")
    add("--rounds", type=positive(int), default=1, help="all take a turn in each")
    counts = several(positive(int))
    add("--concurrency", type=counts, default=(1, 8, 16, 32), metavar="N,..", help="requests at once")
    add("--input-len", type=positive(int), default=128, help="tokens of each prompt")
    add("--output-len", type=positive(int), default=64, help="tokens of each answer")
    options = parser.parse_args(argv)
    command = f"{shlex.quote(sys.executable)} -m kvasir.bench.lab.peer_command"
    peers = [Peer(name, f"{command} {name} {{workload}}") for name in options.ours] + options.peers
    peers.sort(key=lambda peer: peer.name != REFERENCE)  # it goes first: the others are compared with its answers
    file, quiet = options.output / "peers.json", Quiet()
    found = Found.read(options.output, (options.input_len, options.output_len))
    quiet.shares, text = found.busy, ""
    for _ in range(options.rounds):
        for peer in peers:
            quiet.look()
            found.take_turn(peer, Workload(options.concurrency, *found.shape))
            text = write(file, quiet.about_machine(), found)  # nothing is lost by an end
    print(text)
    return 0


def write(file: Path, about: dict[str, Any], found: Found) -> str:
    """-> the page"""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"machine": about} | asdict(found), separators=(",", ":")) + "\n")
    text = as_markdown(about, *found.shape, found.measurements)
    file.with_suffix(".md").write_text(text)
    return text


def _peer(text: str) -> Peer:
    name, separator, target = text.partition("=")
    if not (name and separator and target):
        raise argparse.ArgumentTypeError(f"wants NAME=URL or NAME=COMMAND, got {text!r}")
    if not target.startswith("http") and "{workload}" not in target and "{concurrency}" not in target:
        raise argparse.ArgumentTypeError(f"a command wants {{workload}} or {{concurrency}} in it: {target!r}")
    return Peer(name, target)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
