"""What `kvasir bench check` found: pass or fail, a page, and a picture."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

from kvasir.bench.check_options import CheckLimits
from kvasir.bench.load_generator import LoadResult
from kvasir.bench.markdown import table
from kvasir.bench.openai_client import Outcome
from kvasir.bench.report import samples_s, timelines_of
from kvasir.bench.resident_memory import MemorySamples
from kvasir.bench.timeline import percentile
from kvasir.bench.trend import Trend, trend

_MS, _MIB = 1e3, 1 << 20
_REFUSED = ("HTTP 429", "HTTP 503")  # there are too many, says the service
_WARM_UP_SHARE = 1 / 3  # of the soak: memory may still fill before


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """So many requests at once."""

    concurrency: int
    way: str  # streamed, whole, mixed
    load: LoadResult

    @property
    def name(self) -> str:
        return f"{self.concurrency}, {self.way}"

    def line(self) -> str:
        return f"{self.name}: {len(timelines_of(self.load))} of {len(self.load.outcomes)}, {self.load.duration_s:.1f} s"


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    model: str
    url: str
    input_len: int
    input_unit: str  # tokens, or words
    output_len: int
    phases: Sequence[Phase]
    soak: LoadResult
    soak_concurrency: int
    memory: MemorySamples

    @property
    def outcomes(self) -> list[Outcome]:
        """Of everything."""
        return [outcome for load in (*(phase.load for phase in self.phases), self.soak) for outcome in load.outcomes]

    def latency_samples(self) -> list[tuple[float, float]]:
        """Of the soak: when a request was sent, and seconds to its end."""
        return [(line.sent_s, line.e2el_s) for line in timelines_of(self.soak)]

    def memory_trend(self, process: str) -> Trend | None:
        samples = self.memory[process]
        return trend(samples[int(len(samples) * _WARM_UP_SHARE) :])


@dataclass(frozen=True, slots=True)
class Verdict:
    name: str
    passed: bool | None  # None: could not be measured
    found: str
    wanted: str

    @property
    def word(self) -> str:
        return {True: "pass", False: "**FAIL**", None: "not measured"}[self.passed]


def judge(findings: Findings, limits: CheckLimits) -> list[Verdict]:
    outcomes = findings.outcomes
    errors = [outcome.error for outcome in outcomes if outcome.timeline is None]
    num_empty = sum(outcome.timeline is not None and not outcome.text for outcome in outcomes)
    num_refused = sum(error.startswith(_REFUSED) for error in errors)
    refused = f", {num_refused} of them refused (429 or 503)" if num_refused else ""
    first = ": " + " ".join(errors[0][:100].replace("|", "/").split()) if errors else ""
    return [
        Verdict("errors", not errors, f"{len(errors)} of {len(outcomes)}{refused}{first}", "0"),
        Verdict("empty answers", num_empty == 0, f"{num_empty} of {len(outcomes)}", "0"),
        _judge_p99(findings, limits),
        _judge_growth("latency", trend(findings.latency_samples()), limits.latency_growth, _MS, "ms"),
        *(
            _judge_growth(f"memory of {process}", findings.memory_trend(process), limits.memory_growth, 1 / _MIB, "MiB")
            for process in findings.memory
        ),
    ]


def _judge_p99(findings: Findings, limits: CheckLimits) -> Verdict:
    values_ms = [_MS * value for value in samples_s(findings.soak, "e2el")]
    wanted_ms = limits.p99_ms or limits.p99_ratio * percentile(values_ms, 50)
    wanted = f"<= {wanted_ms:.0f} ms" + ("" if limits.p99_ms else f", {limits.p99_ratio:g} times the median")
    if not values_ms:
        return Verdict("p99 to the end, soak", None, "no answer", wanted)
    found_ms = percentile(values_ms, 99)
    return Verdict("p99 to the end, soak", found_ms <= wanted_ms, f"{found_ms:.0f} ms", wanted)


def _judge_growth(name: str, found: Trend | None, limit: float, scale: float, unit: str) -> Verdict:
    wanted = f"<= {limit:+.0%}"
    if found is None:
        return Verdict(f"growth of {name}, soak", None, "too few samples", wanted)
    text = f"{found.growth:+.1%} of {found.median * scale:.0f} {unit} in {found.span_s / 60:.1f} min"
    return Verdict(f"growth of {name}, soak", found.growth <= limit, text, wanted)


def as_markdown(findings: Findings, verdicts: Sequence[Verdict]) -> str:
    failed = [verdict.name for verdict in verdicts if verdict.passed is False]
    lines = [
        f"# Check of {findings.model}: " + (f"FAIL ({', '.join(failed)})" if failed else "pass"),
        "",
        f"{date.today().isoformat()}, {findings.url}, {findings.input_len} {findings.input_unit} in, "
        f"{findings.output_len} tokens out.",
        f"Soak of {findings.soak.duration_s / 60:.1f} minutes with {findings.soak_concurrency} requests at once, half",
        "of them streamed. Growth is the slope through medians of slices of time; memory counts after a third of the",
        "soak.",
        "",
        *table(" | | found | to pass", [(one.name, one.word, one.found, one.wanted) for one in verdicts], num_texts=4),
        "",
        *table(
            "at once | answered | s | requests/s | tokens out/s | TTFT p50 ms | TTFT p99 ms | end p50 ms | end p99 ms",
            [
                *(_row(phase.name, phase.load) for phase in findings.phases),
                _row(f"{findings.soak_concurrency}, mixed, soak", findings.soak),
            ],
        ),
        "",
        "TTFT is that of streamed answers; of a whole one, all of it comes at once.",
        "",
        "![pictures](check.png)",
        "",
    ]
    return "\n".join(lines)


def _row(name: str, load: LoadResult) -> list[str]:
    lines = timelines_of(load)
    streamed_ms = [_MS * line.ttft_s for line in lines if len(line.arrivals_s) > 1]
    ends_ms = [_MS * line.e2el_s for line in lines]
    rates = len(lines) / load.duration_s, sum(line.num_output_tokens for line in lines) / load.duration_s
    return [
        name,
        f"{len(lines)} of {len(load.outcomes)}",
        f"{load.duration_s:.1f}",
        f"{rates[0]:.2f}",
        f"{rates[1]:.0f}",
        *(f"{percentile(streamed_ms, percent):.0f}" if streamed_ms else "-" for percent in (50, 99)),
        *(f"{percentile(ends_ms, percent):.0f}" for percent in (50, 99)),
    ]


def draw(path: Path, findings: Findings) -> None:
    """Latency by phase; over the soak, latency and memory."""
    from matplotlib.figure import Figure  # late: slow to import, and only this needs it

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    by_phase, latency, memory = figure.subplots(1, 3)
    by_phase.set_title("to the end, by phase: p50 and p99 (s)", fontsize=10)
    for place, phase in enumerate(findings.phases):
        ends_s = samples_s(phase.load, "e2el")
        by_phase.plot([place, place], [percentile(ends_s, 50), percentile(ends_s, 99)], "o-", color="#4c78a8")
    names = [phase.name for phase in findings.phases]
    by_phase.set_xticks(range(len(names)), names, rotation=60, ha="right", fontsize=8)
    by_phase.set_ylim(bottom=0)
    origin_s = min((outcome.sent_s for outcome in findings.soak.outcomes), default=0.0)
    latency.set_title("soak: to the end (s)", fontsize=10)
    samples = findings.latency_samples()
    latency.plot([(at_s - origin_s) / 60 for at_s, _ in samples], [value for _, value in samples], ".", markersize=3)
    memory.set_title("soak: resident memory (MiB)", fontsize=10)
    for process, points in findings.memory.items():
        memory.plot([(at_s - origin_s) / 60 for at_s, _ in points], [size / _MIB for _, size in points], label=process)
    if findings.memory:
        memory.legend(fontsize=8)
    for axes in (latency, memory):
        axes.set_xlabel("minutes")
        axes.set_ylim(bottom=0)
    figure.savefig(path, dpi=110)
