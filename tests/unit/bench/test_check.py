"""`bench check`, the whole command against a server that answers by a script; soaks of a second."""

import asyncio
from pathlib import Path

import pytest

from kvasir.bench.check import main
from kvasir.bench.check_options import CheckLimits, parse_options
from kvasir.bench.check_report import Findings, Verdict, as_markdown, judge
from kvasir.bench.load_generator import LoadResult
from kvasir.bench.openai_client import Outcome
from kvasir.bench.timeline import Timeline
from tests.unit.bench.scripted_server import ScriptedServer

GROUPS = (1, 1, 3, 3, 3, 7, 7, 7)  # streamed, whole and, of more than one, mixed
NUM_LOOKS = 20  # at the memory, before the soak's requests are answered
LIMITS = CheckLimits(memory_growth=0.05, latency_growth=0.25, p99_ms=None, p99_ratio=5.0)


async def check(scripted: ScriptedServer, output: Path, *argv: str) -> int:
    """In a thread of its own: the command has its own event loop, and the server needs ours."""
    scripted.answer_together(*GROUPS)
    come = scripted.may_send
    has_memory = scripted.resident_bytes is not None
    scripted.may_send = lambda number, chunk: (
        come(number, chunk) and (not has_memory or number < sum(GROUPS) or scripted.num_looks >= NUM_LOOKS)
    )
    argv = ("--concurrency", "3,7", "--soak-minutes", "0.015", "--soak-concurrency", "4", *argv)
    # Whatever else this machine does: here latencies are not what is looked at.
    loose = ["--max-p99-ms", "60000", "--max-latency-growth", "1000"]
    command = ["--base-url", scripted.url, "--output", str(output), *loose, *argv]
    return await asyncio.wait_for(asyncio.to_thread(main, command), 60)


async def test_a_service_that_passes(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.gap_s = 0.002
    scripted.resident_bytes = 100 << 20
    assert await check(scripted, tmp_path) == 0
    page = (tmp_path / "check.md").read_text()
    assert page.startswith("# Check of scripted: pass")
    for name in ("1, streamed", "1, whole", *(f"{n}, {way}" for n in (3, 7) for way in ("streamed", "whole", "mixed"))):
        number = name.partition(",")[0]
        assert f"| {name} | {number} of {number} |" in page
    assert "| errors | pass | 0 of" in page
    assert "| empty answers | pass | 0 of" in page
    assert "+0.0% of 100 MiB" in page
    assert (tmp_path / "check.png").read_bytes().startswith(b"\x89PNG")
    assert scripted.most_running == 7
    ways = [body["stream"] for body in scripted.bodies]
    assert ways[:2] == [True, False]
    assert sorted(ways[2 + 3 + 3 : 2 + 3 + 3 + 3]) == [False, True, True], "mixed"
    assert len({body["prompt"] for body in scripted.bodies}) == len(ways), "no prompt twice"


async def test_memory_that_grows_fails(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.gap_s = 0.002
    scripted.resident_bytes, scripted.leaks_bytes = 100 << 20, 10 << 20
    assert await check(scripted, tmp_path) == 1
    assert "| growth of memory of 127.0.0.1:" in (page := (tmp_path / "check.md").read_text())
    assert page.startswith("# Check of scripted: FAIL (growth of memory")


async def test_empty_answers_fail(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.gap_s, scripted.words = 0.01, ("", "")
    assert await check(scripted, tmp_path) == 1
    page = (tmp_path / "check.md").read_text()
    assert page.startswith("# Check of scripted: FAIL (empty answers)")
    assert "growth of memory" not in page, "nobody named a /metrics, and there is none"


async def test_errors_fail_and_metrics_that_are_not_there_are_named(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.status = 500
    argv = ("--model", "m", "--metrics", "http://127.0.0.1:9/metrics")
    assert await check(scripted, tmp_path, *argv) == 1
    page = (tmp_path / "check.md").read_text()
    assert page.startswith("# Check of m: FAIL (errors)")
    assert "HTTP 500" in page
    assert "| growth of memory of 127.0.0.1:9, soak | not measured |" in page


async def test_refusals_are_told_from_other_errors(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.status = 503
    assert await check(scripted, tmp_path, "--soak-concurrency", "1") == 1
    num, page = len(scripted.bodies), (tmp_path / "check.md").read_text()
    assert f"| {num} of {num}, {num} of them refused (429 or 503): HTTP 503" in page


def soaked(latencies_s: list[float]) -> Findings:
    outcomes = tuple(
        Outcome(
            sent_s=float(index),
            text="text",
            timeline=Timeline(sent_s=float(index), arrivals_s=(index + latency_s,), num_output_tokens=1),
        )
        for index, latency_s in enumerate(latencies_s)
    )
    soak = LoadResult(outcomes, max(1.0, len(latencies_s)))
    return Findings(
        model="m", url="u", input_len=1, input_unit="words", output_len=1, phases=[], soak=soak, soak_concurrency=1,
        memory={},
    )  # fmt: skip


def verdict(findings: Findings, limits: CheckLimits, name: str) -> Verdict:
    (found,) = (one for one in judge(findings, limits) if one.name.startswith(name))
    return found


def test_latency_that_grows_fails() -> None:
    assert verdict(soaked([1.0] * 100), LIMITS, "growth of latency").passed is True
    growing = verdict(soaked([1.0 + index / 100 for index in range(100)]), LIMITS, "growth of latency")
    assert growing.passed is False
    assert growing.found.startswith("+66")


def test_p99_by_ratio_and_by_milliseconds() -> None:
    spiky = soaked([1.0] * 90 + [9.0] * 10)
    assert verdict(spiky, LIMITS, "p99").passed is False
    assert verdict(spiky, _within(9100.0), "p99").passed is True
    assert verdict(spiky, _within(8900.0), "p99").passed is False


def _within(p99_ms: float) -> CheckLimits:
    return CheckLimits(memory_growth=0.05, latency_growth=0.25, p99_ms=p99_ms, p99_ratio=5.0)


def test_what_was_not_measured_is_no_pass() -> None:
    nothing = soaked([])
    assert verdict(nothing, LIMITS, "p99").passed is None
    assert "| not measured | no answer |" in as_markdown(nothing, judge(nothing, LIMITS))


@pytest.mark.parametrize("argv", [["--concurrency", "5,x"], ["--concurrency", "0"], ["--soak-minutes", "0"]])
def test_bad_options_are_explained(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse_options(argv)
    assert argv[0] in capsys.readouterr().err
