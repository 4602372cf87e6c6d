"""`kvasir bench speculation`: what speculative decoding gains and costs.

One engine in this process, with and without prompt lookup, in turns. One text repeats what the prompt holds, the other
does not. Only decoding is timed.
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvasir.bench.command_line import positive
from kvasir.bench.lab.engine_runs import new_request, run_until_all_decode
from kvasir.bench.lab.machine import Quiet
from kvasir.bench.lab.page import as_page, lab_parser, write_page
from kvasir.bench.lab.passages import some_passages
from kvasir.bench.lab.rounds import in_turns, median_ratio
from kvasir.bench.markdown import spread, table
from kvasir.cli.builtin_model import prepare_builtin_model
from kvasir.common.speculative_config import SpeculativeConfig
from kvasir.engine.engine import Engine
from kvasir.engine.factory import build_engine
from kvasir.engine.settings import EngineSettings
from kvasir.engine.speculation.payoff import Payoff
from kvasir.engine.speculation.speculator import Speculator
from kvasir.router.text.tokenizer import TextTokenizer

_CONFIG = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_min=2, prompt_lookup_max=4)
_PASSAGE_TOKENS, _BEGUN_TOKENS = 260, 16
_SUBJECTS = ("a lighthouse", "two clockmakers", "the last tram", "a violin", "a map", "winter", "an orchard", "fog")


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
    parser = lab_parser("speculation", __doc__)
    add = parser.add_argument
    add("--tokens", type=positive(int), default=96, help="generated for each request")
    add("--rounds", type=positive(int), default=3, help="that count; one more comes first")
    add("--concurrency", type=positive(int), nargs="+", default=[1, 4], help="requests at once")
    add("--threads", type=positive(int), default=2, help="that the engine computes on")
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
    rows = [
        row(text.name, num_seqs, *compare(engine, text, options.tokens, options.rounds, quiet))
        for num_seqs in options.concurrency
        for text in make_texts(model, num_seqs)
    ]
    lines = [
        f"{model.name}, {options.threads} threads, {options.tokens} tokens a request,",
        f"{_CONFIG.model_dump_json(exclude_none=True)}.",
        f"Decoding alone is timed, {options.rounds} rounds in turns after one that does not count: the median, and the",
        "slowest and the quickest. `copy` goes on with a text that the prompt holds, greedily; `free` tells stories at",
        "temperature 1, in which little comes twice: there it switches itself off but for a try now and then.",
        "",
        *table("text | at once | tokens/s without | tokens/s with | ratio | tokens a step | drafts kept", rows),
    ]
    page = as_page("Speculative decoding by prompt lookup", quiet.about_machine(), lines)
    write_page(options.output, "speculation.md", page)
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


def compare(engine: Engine, text: Text, num_tokens: int, num_rounds: int, quiet: Quiet) -> list[list[Outcome]]:
    """Without and with. What it has learnt of this text's drafts it keeps from round to round."""
    speculator = engine.speculator
    assert speculator is not None
    speculator.payoff = Payoff()
    works = {one: partial(run, engine, one, text, num_tokens) for one in (None, speculator)}
    outcomes = in_turns(works, num_rounds, quiet)
    engine.speculator = speculator
    return list(outcomes.values())


def run(engine: Engine, speculator: Speculator | None, text: Text, num_tokens: int) -> Outcome:
    """All requests at once, each to the same length."""
    engine.speculator = None
    requests = [
        new_request(i, prompt, num_tokens, temperature=text.temperature, seed=i)
        for i, prompt in enumerate(text.prompts)
    ]
    run_until_all_decode(engine, requests)
    engine.speculator = speculator
    before, started_s = engine.stats(), time.perf_counter()
    num_seqs_stepped = 0
    while engine.has_work:
        num_seqs_stepped += engine.stats().num_running
        engine.step()
    took_s, after = time.perf_counter() - started_s, engine.stats()
    num_generated = after.num_generation_tokens - before.num_generation_tokens
    return Outcome(
        tokens_per_s=num_generated / took_s,
        tokens_per_step=num_generated / num_seqs_stepped,
        num_draft_tokens=after.num_draft_tokens - before.num_draft_tokens,
        num_accepted_tokens=after.num_accepted_tokens - before.num_accepted_tokens,
    )


def row(name: str, num_seqs: int, plain: Sequence[Outcome], speculating: Sequence[Outcome]) -> list[str]:
    rates = [[one.tokens_per_s for one in own] for own in (plain, speculating)]
    num_drafts = sum(one.num_draft_tokens for one in speculating)
    num_kept = sum(one.num_accepted_tokens for one in speculating)
    return [
        name,
        str(num_seqs),
        *map(spread, rates),
        f"{median_ratio(rates[1], rates[0]):.2f}",
        f"{statistics.fmean(one.tokens_per_step for one in speculating):.2f}",
        f"{num_kept / max(num_drafts, 1):.0%} of {num_drafts}",
    ]
