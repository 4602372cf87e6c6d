import os
import sys
from pathlib import Path

import pytest

from kvasir.bench.lab import start


def fake_python(directory: Path, script: str) -> str:
    path = directory / "python"
    path.write_text(f"#!{sys.executable}\nimport sys, time\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_parts_are_what_lies_between_the_marks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = "for text in ('loading /m', 'KV cache of 3 blocks', 'decode node serves on x'):\n"
    script += "    time.sleep(0.1); print(text, flush=True)\ntime.sleep(60)"
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, script))
    parts_s = start.start_node(Path("/m"), ["decode"], os.environ)
    assert list(parts_s) == ["imports", "model", "servers"]
    assert min(parts_s.values()) >= 0
    assert sum(parts_s.values()) >= 0.3


def test_a_node_that_ends_is_no_measurement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, "print('loading /m'); print('no such model')"))
    with pytest.raises(RuntimeError, match="no such model"):
        start.start_node(Path("/m"), ["decode"], os.environ)


def test_the_page_has_medians() -> None:
    starts = [{"imports": seconds, "model": 1.0, "servers": 0.0} for seconds in (1.0, 9.0, 2.0)]
    assert "| decode | 3 | 2.00 | 1.00 | 0.00 | 3.00 |" in start.as_markdown({}, {"decode": starts})
