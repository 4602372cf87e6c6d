"""`bench latency` and `bench throughput`, the whole commands against a server that answers by a script."""

import asyncio
import json
from pathlib import Path

import pytest

from kvasir.bench.report import METRICS
from kvasir.cli.bench import main
from tests.unit.bench.scripted_server import WORDS, ScriptedServer


async def run(command: str, scripted: ScriptedServer, *argv: str) -> int:
    """In a thread of its own: the command has its own event loop, and the server needs ours."""
    return await asyncio.wait_for(asyncio.to_thread(main, [command, "--base-url", scripted.url, *argv]), 60)


async def test_latency_asks_one_at_a_time_and_new_prompts(
    scripted: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.gap_s = 0.01
    file = tmp_path / "latency.json"
    argv = ["--input-len", "6", "--output-len", "7", "--num-iters-warmup", "2", "--num-iters", "4"]
    assert await run("latency", scripted, *argv, "--output-json", str(file)) == 0
    assert scripted.most_running == 1
    assert len({body["prompt"] for body in scripted.bodies}) == len(scripted.bodies) == 2 + 4
    assert all(len(body["prompt"].split()) == 6 and body["max_tokens"] == 7 for body in scripted.bodies)
    assert all(body["ignore_eos"] for body in scripted.bodies)
    result = json.loads(file.read_text())
    assert len(result["latencies"]) == 4, "warming up does not count"
    assert min(result["latencies"]) >= len(WORDS) * scripted.gap_s
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 4)
    assert list(result["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert result["percentiles"]["99"] <= max(result["latencies"])
    assert result["median_ttft_ms"] >= 10
    assert result["median_itl_ms"] >= 10
    table = capsys.readouterr().out
    assert "Latency Benchmark Result" in table
    assert METRICS["itl"][1] in table


async def test_latency_of_a_batch(scripted: ScriptedServer) -> None:
    scripted.answer_together(3, 3)
    argv = ["--batch-size", "3", "--num-iters", "2", "--num-iters-warmup", "0", "--no-ignore-eos"]
    assert await run("latency", scripted, *argv) == 0
    assert scripted.most_running == 3
    assert len(scripted.bodies) == 6
    assert not any("ignore_eos" in body for body in scripted.bodies)


async def test_throughput_sends_all_at_once(scripted: ScriptedServer, tmp_path: Path) -> None:
    scripted.answer_together(9)
    file = tmp_path / "throughput.json"
    argv = ["--num-prompts", "9", "--input-len", "5", "--output-len", "7", "--disable-tqdm"]
    assert await run("throughput", scripted, *argv, "--output-json", str(file)) == 0
    assert scripted.most_running == 9
    result = json.loads(file.read_text())
    assert result["num_requests"] == 9
    assert result["total_num_tokens"] == 9 * (11 + 7), "as the server counts them"
    assert result["requests_per_second"] == pytest.approx(9 / result["elapsed_time"])
    assert result["tokens_per_second"] == pytest.approx(9 * (11 + 7) / result["elapsed_time"])


async def test_throughput_within_a_limit(scripted: ScriptedServer) -> None:
    scripted.answer_together(2, 2, 2)
    assert await run("throughput", scripted, "--num-prompts", "6", "--max-concurrency", "2", "--disable-tqdm") == 0
    assert scripted.most_running == 2


@pytest.mark.parametrize("command", ["latency", "throughput"])
async def test_a_failed_request_is_no_measurement(
    command: str, scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.status = 500
    assert await run(command, scripted, "--model", "m") == 1
    assert "requests failed, the first with: HTTP 500" in capsys.readouterr().err
