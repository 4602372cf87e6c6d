"""One contender of `kvasir bench peers`, in a process of its own.

    python -m kvasir.bench.lab.peer_command NAME WORKLOAD

WORKLOAD is a JSON file {"num_tokens": n, "batches": [[prompt, ...], ...]}, a prompt being a list of token ids. For each
batch one line of JSON goes to stdout: {"concurrency", "tokens_per_s", "decode_tokens_per_s", "token_ids"}. Any program
that reads the one and prints the other can take part.
"""

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvasir.bench.lab.contenders import EngineContender, Quantization, Tokens, TransformersContender
from kvasir.bench.lab.machine import let_threads_sleep
from kvasir.cli.builtin_model import prepare_builtin_model

# Prompts, all at once, and how many tokens each gets; the tokens.
Generate = Callable[[Sequence[Tokens], int], list[list[int]]]


def engine(model: Path, quantization: Quantization) -> Generate:
    let_threads_sleep()  # as in a node
    return EngineContender(model, quantization).generate


CONTENDERS: dict[str, Callable[[Path], Generate]] = {
    "kvasir-fp32": lambda model: engine(model, "none"),
    "kvasir-fp16": lambda model: engine(model, "fp16"),
    "kvasir-int8": lambda model: engine(model, "int8"),
    "kvasir-int4": lambda model: engine(model, "int4"),
    "kvasir-w8a8": lambda model: engine(model, "w8a8_int8"),
    "kvasir-w4a8": lambda model: engine(model, "w4a8_int8"),
    "transformers": lambda model: TransformersContender(model).generate,
}


def measure(generate: Generate, prompts: Sequence[Tokens], num_tokens: int) -> dict[str, object]:
    """Decoding is what the whole takes longer than the first tokens alone: the same for everybody."""
    generate(prompts[:2], 3)  # whatever is done once for prompts of this length is done
    generate([prompt[:8] for prompt in prompts], 3)  # and for as many that decode
    started_s = time.perf_counter()
    generate(prompts, 1)
    first_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    token_ids = generate(prompts, num_tokens)
    whole_s = time.perf_counter() - started_s
    return {
        "concurrency": len(prompts),
        "tokens_per_s": len(prompts) * num_tokens / whole_s,
        "decode_tokens_per_s": len(prompts) * (num_tokens - 1) / (whole_s - first_s),
        "token_ids": token_ids,
    }


def main(argv: list[str]) -> int:
    if len(argv) != 2 or argv[0] not in CONTENDERS:
        print(f"usage: peer_command {{{','.join(CONTENDERS)}}} WORKLOAD", file=sys.stderr)
        return 2
    workload = json.loads(Path(argv[1]).read_text())
    generate = CONTENDERS[argv[0]](prepare_builtin_model())
    for prompts in workload["batches"]:
        print(json.dumps(measure(generate, prompts, workload["num_tokens"])), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
