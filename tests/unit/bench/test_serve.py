"""The whole command against a server that answers by a script."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from kvasir.bench.serve import default_filename
from kvasir.cli.bench import main
from tests.unit.bench.scripted_server import WORDS, ScriptedServer

TOTALS = {"completed": 8, "failed": 0, "total_input_tokens": 88, "total_output_tokens": 56}
VLLM_KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput",
    "max_output_tokens_per_s", "max_concurrent_requests",
    "mean_ttft_ms", "median_ttft_ms", "std_ttft_ms", "p50_ttft_ms", "p99_ttft_ms",
    "mean_itl_ms", "median_itl_ms", "std_itl_ms", "p50_itl_ms", "p99_itl_ms",
}  # fmt: skip
DETAIL_KEYS = {
    "input_lens", "output_lens", "ttfts", "itls", "latencies", "start_times", "queue_times", "generated_texts",
    "errors",
}  # fmt: skip


async def bench(scripted: ScriptedServer, *argv: str) -> int:
    """In a thread of its own: the command has its own event loop, and the server needs ours."""
    return await asyncio.wait_for(asyncio.to_thread(main, ["serve", "--base-url", scripted.url, *argv]), 60)


async def test_result_file_and_table(
    scripted: ScriptedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.gap_s = 0.01
    scripted.answer_together(2, 4, 4)
    argv = ["--num-prompts", "8", "--random-input-len", "10", "--random-output-len", "7", "--max-concurrency", "4"]
    argv += [
        "--percentile-metrics",
        "ttft,itl",
        "--metric-percentiles",
        "50,99",
        "--goodput",
        "ttft:60000",
        "tpot:60000",
    ]
    argv += ["--save-result", "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json"]
    argv += ["--plot", str(tmp_path / "r.png"), "--num-warmups", "2", "--metadata", "machine=lab"]
    assert await bench(scripted, *argv) == 0

    result: dict[str, Any] = json.loads((tmp_path / "r.json").read_text())
    assert set(result) == VLLM_KEYS | DETAIL_KEYS | {"machine"}
    assert {key: result[key] for key in TOTALS} == TOTALS
    assert result["model_id"] == "scripted"
    assert result["request_rate"] == "inf"
    assert result["max_concurrent_requests"] == scripted.most_running == 4
    assert result["request_goodput"] == result["request_throughput"] == pytest.approx(8 / result["duration"])
    assert result["output_throughput"] == pytest.approx(56 / result["duration"])
    assert all(len(itls) == len(WORDS) - 1 for itls in result["itls"])
    assert min(result["ttfts"]) >= 0.01, "the server waits before the first word"
    assert result["duration"] >= 2 * 5 * 0.01, "8 requests, 4 at once, 5 words each"
    assert len(scripted.bodies) == 8 + 2
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")

    table = capsys.readouterr().out
    assert table.splitlines()[0] == "============ Serving Benchmark Result ============"
    for row in (
        "Successful requests:                     8",
        "Mean TTFT (ms):",
        "P50 ITL (ms):",
        "Request goodput (req/s):",
    ):
        assert row in table
    assert "TPOT" not in table


async def test_failed_requests_are_counted_and_shown(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.status = 500
    assert await bench(scripted, "--num-prompts", "3", "--model", "m") == 1
    output = capsys.readouterr()
    assert "Failed requests:                         3" in output.out
    assert "3 of 3 requests failed: HTTP 500" in output.err


async def test_a_single_failure_is_told_and_the_rest_is_measured(
    scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted.num_refused = 1
    assert await bench(scripted, "--num-prompts", "3") == 1
    output = capsys.readouterr()
    assert "Successful requests:                     2" in output.out
    assert "1 of 3 requests failed: HTTP 429" in output.err


async def test_chat_and_custom_prompts(scripted: ScriptedServer, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "one"}\n{"prompt": "two", "output_tokens": 3}\n')
    argv = ["--backend", "openai-chat", "--dataset-name", "custom", "--dataset-path", str(prompts)]
    argv += ["--num-prompts", "2", "--temperature", "0", "--extra-body", '{"top_k": 4}', "--max-concurrency", "1"]
    assert await bench(scripted, *argv) == 0
    asked = {(body["messages"][0]["content"], body["max_completion_tokens"]) for body in scripted.bodies}
    assert asked == {("one", 256), ("two", 3)}
    assert all((body["temperature"], body["top_k"]) == (0.0, 4) for body in scripted.bodies)


async def test_a_server_that_never_comes(scripted: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    scripted.status = 503
    assert await bench(scripted, "--ready-check-timeout-sec", "0.1", "--num-prompts", "1") == 1
    assert "no answer within 0.1 s: HTTP 503" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--dataset-name", "custom"], "--dataset-path"),
        (["--prompt-format", "ids"], "--tokenizer"),
        (["--goodput", "itl:5"], "knows ttft"),
        (["--goodput", "ttft:soon"], "MILLISECONDS"),
        (["--extra-body", "[1]"], "JSON object"),
        (["--header", "novalue"], "NAME=VALUE"),
        (["--percentile-metrics", "ttft,speed"], "speed"),
        (["--metric-percentiles", "101"], "0..100"),
        (["--request-rate", "0"], "positive"),
        (["--random-range-ratio", "1"], "range ratio"),
        (["--num-promts", "1"], "--num-promts"),
        (["--num-prompts", "many"], "wants a number, got 'many'"),
        (["--num-warmups", "-1"], "not be negative"),
        (["--base-url", "localhost:8000"], "http://HOST:PORT"),
    ],
)
def test_bad_options_are_explained(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["serve", *argv])
    assert exit_info.value.code == 2
    assert message in capsys.readouterr().err


def test_a_tokenizer_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--tokenizer", str(tmp_path)]) == 1
    assert "tokenizer.json does not exist" in capsys.readouterr().err


def test_default_filename() -> None:
    result = {"label": None, "backend": "openai", "request_rate": "inf", "model_id": "org/m", "date": "20260101-000000"}
    assert default_filename(result | {"max_concurrency": 4}) == "openai-infqps-concurrency4-m-20260101-000000.json"
    assert default_filename(result | {"max_concurrency": None, "label": "x"}) == "x-infqps-m-20260101-000000.json"
