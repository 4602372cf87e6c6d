"""What `kvasir bench kv` makes of its measurements; and that contenders move what they say that they move."""

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from kvasir.bench.lab.kv import main
from kvasir.bench.lab.kv_cases import CASES, SIZES, Contender, Places
from kvasir.bench.lab.kv_crossover import Fetch, Row, num_blocks
from kvasir.bench.lab.kv_crossover import as_markdown as crossover_as_markdown
from kvasir.bench.lab.kv_mover import Mover
from kvasir.bench.lab.kv_report import Movement, Result, write_results
from kvasir.bench.lab.machine import Quiet

FEW = replace(SIZES["64 KiB"], num_blocks=3)
CONTENDERS = {contender.name: contender for case in CASES.values() for contender in case.contenders}


def result() -> Result:
    return Result(
        case="tcp",
        size="720 KiB",
        num_bytes=64_000_000,
        target=0.9,
        kinds={"tcp": "ours", "fast": "plain", "slow": "plain"},
        movements={
            "tcp": [Movement(0.0, 0.040, 0.06), Movement(0.0, 0.050, 0.06), Movement(0.0, 0.060, 0.06)],
            "fast": [Movement(0.005, 0.027, 0.04), Movement(0.005, 0.040, 0.04), Movement(0.005, 0.049, 0.04)],
            "slow": [Movement(0.0, 0.2, 0.1)] * 3,
        },
    )


def test_the_ratio_is_that_of_the_rounds_to_the_fastest_plain_way() -> None:
    assert result().baseline == "fast"
    assert result().ratio("tcp") == pytest.approx(0.9)  # of 0.8, 0.9, 0.9
    assert result().ratio("fast") == 1.0


def test_results_are_written_with_the_target_and_how_quiet_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    quiet = Quiet()
    quiet.look()
    write_results(tmp_path, [replace(result(), about={"busy_with_other_things": str(quiet)})], {"more": ["and more"]})
    table = (tmp_path / "kv.md").read_text()
    assert "| **tcp** | ours | 50.0 | 0.0 | 40.0 | 60.0 | 1.28 | 60 | 0.90 | 0.9 |" in table
    assert f"busy with other things {quiet}" in table
    assert "and more" in table
    assert table in capsys.readouterr().out
    written = json.loads((tmp_path / "kv.json").read_text())["results"][0]["movements"]
    assert [movement["read_s"] for movement in written["tcp"]] == [0.04, 0.05, 0.06]


def test_what_an_earlier_run_has_measured_stays(tmp_path: Path) -> None:
    write_results(tmp_path, [result(), replace(result(), size="64 KiB", num_bytes=1)], {"more": ["once"]})
    write_results(tmp_path, [replace(result(), case="redis"), replace(result(), num_bytes=2)], {"more": ["twice"]})
    table = (tmp_path / "kv.md").read_text()
    headings = [line for line in table.splitlines() if line.startswith("## ")]
    assert headings == [
        "## tcp, blocks of 720 KiB",
        "## tcp, blocks of 64 KiB",
        "## redis, blocks of 720 KiB",
    ]
    assert "twice" in table
    assert "once" not in table
    written = json.loads((tmp_path / "kv.json").read_text())["results"]
    assert [one["num_bytes"] for one in written] == [2, 1, 64_000_000]


def test_where_fetching_and_computing_cross() -> None:
    fast, slow = Fetch(0.3, is_whole=True), Fetch(0.05, is_whole=False)
    rows = [Row(32, 0.040, 0.030, 0.020, fast), Row(64, 0.080, 0.030, 0.010, slow)]
    text = "\n".join(crossover_as_markdown(rows))
    assert "| 32 | 40.0 | 50.0 | 30.0 | 74 | fetched in 300 ms |" in text
    assert "| 64 | 80.0 | 40.0 | 30.0 | 44 | given up for computing, after 50 ms |" in text
    assert "faster from 64 tokens on" in text
    assert [num_blocks(n) for n in (1, 16, 17, 32, 33)] == [0, 0, 1, 1, 2]


@pytest.mark.parametrize(
    "name",
    [
        "tcp",
        "zmq, pushed",
        "zmq, asked for",
        "shared_storage",
        "a new file, mapped",
        "a file kept mapped",
    ],
)
def test_a_contender_moves_all_blocks_between_two_processes(name: str, tmp_path: Path) -> None:
    with closing(Mover(CONTENDERS[name], FEW, Places(tmp_path, "", {}))) as mover:
        for _ in range(2):
            assert mover.move().s > 0


def test_a_contender_that_moves_something_else_is_found_out(tmp_path: Path) -> None:
    idle = Contender(name="idle", module="kv_plain", task={"way": "nothing"})
    with (
        closing(Mover(idle, FEW, Places(tmp_path, "", {}))) as mover,
        pytest.raises(RuntimeError, match="others than were sent"),
    ):
        mover.move()


@pytest.fixture
def router() -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            names = {"blocks": 10, "bytes": 7.5e6, "seconds": 0.1, "overlapped_seconds": 0.08}
            lines = [f'kvasir:dispatch_kv_{name}_total{{model="m"}} {value}' for name, value in names.items()]
            self.wfile.write("\n".join([*lines, ""]).encode() if self.path == "/metrics" else b"")

        def log_message(self, *_: object) -> None: ...

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
        server.shutdown()


def test_the_overlap_of_a_running_router(router: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--base-url", router]) == 0
    assert "0.080 s, 80%" in capsys.readouterr().out
