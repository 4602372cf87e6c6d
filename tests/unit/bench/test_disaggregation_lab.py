"""What `kvasir bench disaggregation` makes of its points; and that it sends the same to both."""

import asyncio
import json
from pathlib import Path

import pytest

from kvasir.bench.lab.disaggregation import Shape, main
from kvasir.bench.lab.disaggregation_report import COLOCATED, DISAGGREGATED, Point, Unloaded, as_markdown, limits_s
from tests.unit.bench.scripted_server import ScriptedServer

UNLOADED = [Unloaded(COLOCATED, 0.1, 0.01), Unloaded(DISAGGREGATED, 0.3, 0.02), Unloaded(COLOCATED, 0.1, 0.01)]


def point(setup: str, rate: float, itl_p99_s: float, requests: list[tuple[float, float]]) -> Point:
    return Point(setup=setup, rate=rate, itl_p50_s=0.01, itl_p99_s=itl_p99_s, requests=requests)


def test_goodput_is_what_met_both_limits_of_the_colocated_node() -> None:
    assert limits_s(UNLOADED, 2) == (0.2, 0.02)
    requests = [(0.2, 0.02), (0.21, 0.01), (0.1, 0.021), (0.5, 0.05)]
    one = point(DISAGGREGATED, 2.0, 0.1, requests)
    assert one.goodput_rps(*limits_s(UNLOADED, 2)) == 0.5, "one of four, at two a second"
    assert one.goodput_rps(*limits_s(UNLOADED, 5)) == 2.0


def test_the_page_says_where_disaggregation_loses() -> None:
    points = [
        point(COLOCATED, 1.0, 0.2, [(0.1, 0.01)]),
        point(DISAGGREGATED, 1.0, 0.1, [(0.3, 0.01)]),
        point(COLOCATED, 2.0, 0.1, [(0.1, 0.01)]),
        point(DISAGGREGATED, 2.0, 0.102, [(0.1, 0.01)]),
    ]
    page = as_markdown({}, {"input_len": 1, "output_len": 2}, UNLOADED, points)
    assert "- ITL p99 ms: disaggregation wins at 1, **loses at no** requests/s." in page, "2 % are neither"
    assert "- TTFT p50 ms: disaggregation wins at no, **loses at 1** requests/s." in page
    assert "- goodput/s at 2x: disaggregation wins at no, **loses at 1** requests/s." in page
    assert "| 1 | disaggregated | 10 | 100 | 300 | 300 | 0.00 | 1.00 |" in page


async def test_both_get_the_same_and_runs_add_up(scripted: ScriptedServer, tmp_path: Path) -> None:
    argv = ["--rates", "200", "--seconds", "0.02", "--output", str(tmp_path), "--input-len", "3", "--output-len", "5"]
    argv += ["--colocated", scripted.url, "--disaggregated", scripted.url]
    for _ in range(2):
        assert await asyncio.wait_for(asyncio.to_thread(main, argv), 60) == 0
    written = json.loads((tmp_path / "disaggregation.json").read_text())
    assert [one["setup"] for one in written["points"]] == [COLOCATED, DISAGGREGATED] * 2
    assert "Medians of 2 round(s)" in (tmp_path / "disaggregation.md").read_text()
    assert (tmp_path / "disaggregation.png").read_bytes().startswith(b"\x89PNG")
    prompts = [tuple(body["prompt"]) for body in scripted.bodies]
    assert len(prompts) == 2 * 2 * (3 + 4)
    assert len(set(prompts)) == len(prompts) / 2, "both set-ups get the same, and no run what an earlier one has sent"


async def test_points_of_another_shape_are_not_mixed_in(scripted: ScriptedServer, tmp_path: Path) -> None:
    argv = ["--rates", "200", "--seconds", "0.02", "--output", str(tmp_path), "--input-len", "3"]
    argv += ["--colocated", scripted.url, "--disaggregated", scripted.url]
    for length in ("5", "6"):
        await asyncio.wait_for(asyncio.to_thread(main, [*argv, "--output-len", length]), 60)
    written = json.loads((tmp_path / "disaggregation.json").read_text())
    assert len(written["points"]) == 2
    assert Shape(**written["shape"]).output_len == 6


async def test_a_failed_request_is_no_measurement(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.fails_within = True
    argv = ["--output", str(tmp_path), "--colocated", scripted.url, "--disaggregated", scripted.url]
    with pytest.raises(ValueError, match="lost a node"):
        await asyncio.wait_for(asyncio.to_thread(main, argv), 60)
