"""`kvasir bench speculation`: what speculative decoding gains and costs.

One engine in this process, with and without prompt lookup, in turns. One text repeats what the prompt holds, the other
does not. Only decoding is timed. Written to a folder as a table.
"""

import argparse
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from kvasir.bench.lab.kv_quality_text import some_passages
from kvasir.bench.lab.kv_report import Quiet, machine
from kvasir.cli.model import prepare_builtin_model
from kvasir.common.speculative_config import SpeculativeConfig
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.request import Request, RequestId
from kvasir.engine.sampling_params import SamplingParams
from kvasir.engine.settings import EngineSettings
from kvasir.engine.speculation.payoff import Payoff
from kvasir.engine.speculation.speculator import Speculator
from kvasir.router.text.tokenizer import TextTokenizer

_CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)
_PASSAGE_TOKENS, _BEGUN_TOKENS = 260, 16
_SUBJECTS = (
    "a lighthouse",
    "two clockmakers",
    "the last tram",
    "a violin",
    "a lost map",
    "winter",
    "an orchard",
    "fog",
)


@dataclass(frozen=True, slots=True)
class Text:
    name: str
    prompts: tuple[list[int], ...]  # one a request
    temperature: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one run, from the moment that all of its requests decode."""

    tokens_per_s: float
    tokens_per_step: float  # of one request
    num_draft_tokens: int
    num_accepted_tokens: int


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="kvasir bench speculation", description=(__doc__ or "").partition("\n")[2].strip()
    )
    parser.add_argument("--tokens", type=int, default=96, help="generated for each request (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="that count; one more comes first (default: %(default)s)")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 4], help="(default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="(default: %(default)s)")
    parser.add_argument("--output", type=Path, default=Path("bench/results"), help="folder (default: %(default)s)")
    options = parser.parse_args(argv)
    model, quiet = prepare_builtin_model(), Quiet()
    settings = EngineSettings(
        model=str(model),
        num_threads=options.threads,
        kv_cache_memory=800 << 20,
        speculation=_CONFIG,
        max_model_len=1024,
    )
    engine, _, _ = build_engine(settings)
    rows = []
    for num_seqs in options.concurrency:
        for text in make_texts(model, num_seqs):
            quiet.look()
            plain, speculating = compare(engine, text, options.tokens, options.rounds)
            rows.append(table_row(text.name, num_seqs, plain, speculating))
    about = machine() | {"busy_with_other_things": str(quiet)}
    lines = [
        "# Speculative decoding by prompt lookup",
        "",
        ", ".join(f"{key} {value}" for key, value in about.items()),
        "",
        f"{model.name}, {options.threads} threads, {options.tokens} tokens a request,",
        f"{_CONFIG.model_dump_json(exclude_none=True)}.",
        f"Decoding alone is timed, {options.rounds} rounds in turns after one that does not count: the median, and the",
        "slowest and the quickest. `copy` goes on with a text that the prompt holds, greedily; `free` tells stories at",
        "temperature 1, in which little comes twice: there it switches itself off but for a try now and then.",
        "",
        "| text | at once | tokens/s without | tokens/s with | ratio | tokens a step | drafts kept |",
        "|---|---:|---:|---:|---:|---:|---:|",
        *rows,
    ]
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "speculation.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    return 0


def make_texts(model: Path, num_seqs: int) -> list[Text]:
    tokenizer = TextTokenizer.load(model)
    passages = [
        tokenizer.encode(passage, add_special_tokens=False)[:_PASSAGE_TOKENS] for _, passage in some_passages(num_seqs)
    ]
    stories = [f"Here is a story about {_SUBJECTS[i % len(_SUBJECTS)]}, number {i}.\n\n" for i in range(num_seqs)]
    free = tuple(tokenizer.encode(story, add_special_tokens=False) for story in stories)
    tokenizer.close()
    copied = tuple(tokens + tokens[:_BEGUN_TOKENS] for tokens in passages)
    return [Text("copy", copied, temperature=0.0), Text("free", free, temperature=1.0)]


def compare(engine: Engine, text: Text, num_tokens: int, num_rounds: int) -> tuple[list[Outcome], list[Outcome]]:
    """Without and with, in turns. What it has learnt of this text's drafts it keeps from round to round."""
    speculator = engine.speculator
    assert speculator is not None
    speculator.payoff = Payoff()
    plain, speculating = [], []
    for _ in range(1 + num_rounds):
        plain.append(run(engine, None, text, num_tokens))
        speculating.append(run(engine, speculator, text, num_tokens))
    return plain[1:], speculating[1:]


def run(engine: Engine, speculator: Speculator | None, text: Text, num_tokens: int) -> Outcome:
    """All requests at once, each to the same length."""
    engine.speculator = None
    requests = [
        Request(
            request_id=RequestId(f"r{i}"),
            prompt_token_ids=list(prompt),
            sampling=SamplingParams(max_tokens=num_tokens, temperature=text.temperature, seed=i),
        )
        for i, prompt in enumerate(text.prompts)
    ]
    for request in requests:
        engine.submit(request)
    while not all(request.output_token_ids for request in requests):
        engine.step()
    engine.speculator = speculator
    before, started_s = engine.stats(), time.perf_counter()
    num_seqs_stepped = 0
    while engine.has_work:
        num_seqs_stepped += engine.stats().num_running
        engine.step()
    took_s, after = time.perf_counter() - started_s, engine.stats()
    engine.speculator = speculator
    num_generated = after.num_generation_tokens - before.num_generation_tokens
    return Outcome(
        tokens_per_s=num_generated / took_s,
        tokens_per_step=num_generated / num_seqs_stepped,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def table_row(name: str, num_seqs: int, plain: list[Outcome], speculating: list[Outcome]) -> str:
    ratio = statistics.median(b.tokens_per_s / a.tokens_per_s for a, b in zip(plain, speculating, strict=True))
    num_drafts = sum(one.num_draft_tokens for one in speculating)
    cells = [
        name,
        str(num_seqs),
        _spread([one.tokens_per_s for one in plain]),
        _spread([one.tokens_per_s for one in speculating]),
        f"{ratio:.2f}",
        f"{statistics.fmean(one.tokens_per_step for one in speculating):.2f}",
        f"{sum(one.num_accepted_tokens for one in speculating) / max(num_drafts, 1):.0%} of {num_drafts}",
    ]
    return f"| {' | '.join(cells)} |"


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
