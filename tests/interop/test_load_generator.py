"""A load generator that nobody here wrote, beside `kvasir bench serve`: both count alike and mean the same by a number.

Times are not compared: those are in bench/results/load_generators.md.
"""

import asyncio
import json
import os
import signal
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from aiohttp.test_utils import TestServer

from kvasir.bench.serve import main
from kvasir.bench.timeline import Timeline
from tests.service import REPO
from tests.unit.bench.scripted_server import WORDS, ScriptedServer
from tests.unit.router.openai.conftest import running_router, saying

pytestmark = [pytest.mark.interop, pytest.mark.timeout(300)]

# `make test-interop` installs it here, apart from what the suite itself needs.
PYTHON = Path(os.environ.get("INTEROP_PYTHON", REPO / "build/interop/bin/python"))
WITHIN_S = 120
NUM_PROMPTS, NUM_TOKENS = 12, 40
ENDPOINTS = {"/v1/completions": "openai", "/v1/chat/completions": "openai-chat"}


@dataclass(frozen=True)
class Load:
    """The same for both: these prompts, each once, four at a time."""

    url: str
    model: str
    path: str
    folder: Path

    def prompts(self) -> Path:
        path = self.folder / "prompts.jsonl"
        asked = ({"prompt": f"hello {number}", "output_tokens": NUM_TOKENS} for number in range(NUM_PROMPTS))
        path.write_text("".join(f"{json.dumps(one)}\n" for one in asked))
        return path

    async def by_guidellm(self) -> dict[str, Any]:
        """Its report: `metrics`, and `requests` one by one."""
        report = self.folder / "guidellm.json"
        backend = f"kind=openai_http,target={self.url},model={self.model},request_format={self.path}"
        process = await asyncio.create_subprocess_exec(
            *(PYTHON.parent / "guidellm", "run", "--disable-console", "--backend"),
            *(f"{backend},validate_backend=false,max_tokens={NUM_TOKENS}", "--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={NUM_PROMPTS}"),
            *("--data", f"kind=json_file,path={self.prompts()}", "--output", f"kind=json,path={report}"),
            env={**os.environ, "GUIDELLM__MAX_WORKER_PROCESSES": "1", "HF_HUB_OFFLINE": "1"},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=self.folder,
            start_new_session=True,
        )
        try:
            said, _ = await asyncio.wait_for(process.communicate(), WITHIN_S)
        finally:
            with suppress(ProcessLookupError):  # it has workers
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
        assert process.returncode == 0, said.decode()
        [benchmark] = json.loads(report.read_text())["benchmarks"]
        found: dict[str, Any] = benchmark
        return found

    async def by_us(self) -> dict[str, Any]:
        """The result file. In a thread of its own: the command has its own event loop, and the server needs ours."""
        argv = ["--base-url", self.url, "--model", self.model, "--backend", ENDPOINTS[self.path]]
        argv += ["--dataset-name", "custom", "--dataset-path", str(self.prompts()), "--num-prompts", str(NUM_PROMPTS)]
        argv += ["--max-concurrency", "4", "--percentile-metrics", "ttft,tpot,itl,e2el", "--save-result"]
        argv += ["--save-detailed", "--result-dir", str(self.folder), "--result-filename", "ours.json"]
        assert await asyncio.wait_for(asyncio.to_thread(main, argv), WITHIN_S) == 0
        found: dict[str, Any] = json.loads((self.folder / "ours.json").read_text())
        return found


def check_counts(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    totals, metrics = theirs["metrics"]["request_totals"], theirs["metrics"]
    assert (ours["completed"], ours["failed"]) == (totals["successful"], totals["errored"]) == (NUM_PROMPTS, 0)
    assert totals["incomplete"] == 0
    assert ours["total_input_tokens"] == metrics["prompt_token_count"]["successful"]["total_sum"] > 0
    assert ours["total_output_tokens"] == metrics["output_token_count"]["successful"]["total_sum"] > 0
    assert sorted(ours["generated_texts"]) == sorted(request["output"] for request in theirs["requests"]["successful"])


def timeline_of(request: dict[str, Any]) -> Timeline:
    """Of the moments that guidellm has noted: it keeps the first and the last chunk only."""
    timings = request["info"]["timings"]
    return Timeline(
        sent_s=timings["request_start"],
        arrivals_s=(timings["first_token_iteration"], timings["last_token_iteration"]),
        num_output_tokens=request["output_tokens"],
    )


def close(value: float) -> Any:
    """What is in both files is rounded there, in milliseconds."""
    return pytest.approx(value, rel=1e-3, abs=1e-3)


def check_definitions(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """guidellm's ITL is our TPOT; its TPOT has the first token in it, and ours has not."""
    requests = theirs["requests"]["successful"]
    timelines = [timeline_of(request) for request in requests]
    for request, timeline in zip(requests, timelines, strict=True):
        assert timeline.tpot_s is not None
        num_tokens = timeline.num_output_tokens
        assert request["time_to_first_token_ms"] == close(1e3 * timeline.ttft_s)
        assert request["inter_token_latency_ms"] == close(1e3 * timeline.tpot_s)
        assert request["time_per_output_token_ms"] == close(1e3 * timeline.e2el_s / num_tokens)
    of_all = theirs["metrics"]["time_to_first_token_ms"]["successful"]
    assert of_all["mean"] == close(1e3 * mean(timeline.ttft_s for timeline in timelines))

    tpots_s = []
    for ttft_s, itls_s, num_tokens in zip(ours["ttfts"], ours["itls"], ours["output_lens"], strict=True):
        arrivals_s = [ttft_s]
        for itl_s in itls_s:
            arrivals_s.append(arrivals_s[-1] + itl_s)
        timeline = Timeline(sent_s=0.0, arrivals_s=tuple(arrivals_s), num_output_tokens=num_tokens)
        assert timeline.tpot_s == pytest.approx(sum(itls_s) / (num_tokens - 1))
        tpots_s.append(timeline.tpot_s)
    assert ours["mean_ttft_ms"] == close(1e3 * mean(ours["ttfts"]))
    assert ours["mean_itl_ms"] == close(1e3 * mean(itl_s for itls_s in ours["itls"] for itl_s in itls_s))
    assert ours["mean_tpot_ms"] == close(1e3 * mean(tpots_s))


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_counts_and_definitions(path: str, tmp_path: Path) -> None:
    """Five chunks that are seven tokens: what counts chunks and what counts tokens differ here."""
    script = ScriptedServer(gap_s=0.01)
    async with TestServer(script.app()) as server:
        load = Load(str(server.make_url("")).rstrip("/"), "scripted", path, tmp_path)
        theirs, ours = await load.by_guidellm(), await load.by_us()
    assert len(script.bodies) == 2 * NUM_PROMPTS
    check_counts(ours, theirs)
    check_definitions(ours, theirs)
    num_chunks = {request["info"]["timings"]["token_iterations"] for request in theirs["requests"]["successful"]}
    assert num_chunks == {len(itls) + 1 for itls in ours["itls"]} == {len(WORDS)}


@pytest.mark.parametrize("path", ENDPOINTS)
async def test_a_router_is_counted_alike(path: str, tmp_path: Path) -> None:
    """Real chunks with ids, empty ones at the ends, and usage in each if that is asked for."""
    async with running_router(saying("a" * 60, pause_s=0.002)) as router:
        load = Load(router.url, "m", path, tmp_path)
        theirs, ours = await load.by_guidellm(), await load.by_us()
    check_counts(ours, theirs)
    assert ours["output_lens"] == [NUM_TOKENS] * NUM_PROMPTS
    num_chunks = [request["info"]["timings"]["token_iterations"] for request in theirs["requests"]["successful"]]
    assert num_chunks == [len(itls) + 1 for itls in ours["itls"]] == [NUM_TOKENS] * NUM_PROMPTS
