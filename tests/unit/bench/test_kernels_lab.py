"""`kvasir bench kernels`: the cases are right in small, and where there is no GPU, no number is made up."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvasir.bench.lab import kernel_cases, kernel_cases_rows, kernels
from kvasir.bench.lab.kernel_case import Case, Prepared
from kvasir.bench.lab.kernel_tests import run_tests

SMALL = {
    "decode_attention": lambda: kernel_cases.decode_case(2, 40, "cpu"),
    "prefill_attention": lambda: kernel_cases.prefill_case(40, "cpu"),
    "write_kv": lambda: kernel_cases.write_kv_case(32, "cpu"),
    "rms_norm": lambda: kernel_cases_rows.rms_norm_case(3, 64, "cpu"),
    "silu_mul": lambda: kernel_cases_rows.gated_case("silu_mul", 3, 64, "cpu"),
    "gelu_mul": lambda: kernel_cases_rows.gated_case("gelu_mul", 3, 64, "cpu"),
    "qk_norm": lambda: kernel_cases_rows.qk_norm_case(3, "cpu"),
    "pack_blocks": lambda: kernel_cases_rows.packing_case("int8", False, 3, (1, 2, 2, 4, 64), "cpu"),
    "unpack_blocks": lambda: kernel_cases_rows.packing_case("int8", True, 3, (1, 2, 2, 4, 64), "cpu"),
    "sample": lambda: kernel_cases_rows.sample_case(2, 100, "cpu", temperature=1.0, top_p=0.9),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_a_case_runs_and_its_check_passes(make: "type[Prepared]") -> None:
    prepared = make()
    prepared.run()
    prepared.check()
    assert prepared.amount > 0


def test_a_check_fails_where_the_result_is_wrong() -> None:
    for make in (SMALL["decode_attention"], SMALL["write_kv"], SMALL["unpack_blocks"], SMALL["qk_norm"]):
        with pytest.raises(AssertionError):
            make().check()  # nothing has run


def test_decode_attention_must_read_all_keys_and_values() -> None:
    prepared = kernel_cases.decode_case(2, 40, "cpu")
    assert prepared.amount == 2 * 40 * 2 * 8 * 128 * 2 + 2 * 2 * 32 * 128 * 2


def small_case(kernel: str, wanted: float | None = 0.85) -> Case:
    return Case(
        kernel=kernel, shape="small", bound="copy", wanted=wanted, make=lambda device: SMALL[kernel]()
    )  # fmt: skip


def broken(device: str) -> Prepared:
    prepared = SMALL["qk_norm"]()
    return replace(prepared, run=lambda: None)


def test_a_kernel_that_fails_is_named_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, but for the clock and the ceilings."""

    def timed(run: Callable[[], object]) -> float:
        run()
        return 2e-6

    cases = [small_case("silu_mul"), replace(small_case("qk_norm"), make=broken), small_case("write_kv", None)]
    monkeypatch.setattr(kernels, "all_cases", lambda: cases)
    monkeypatch.setattr(kernels, "median_s", timed)
    monkeypatch.setattr(kernels, "measure_ceilings", lambda device: kernels.Ceilings(1e9, 1e12))
    monkeypatch.setattr(kernels, "run_tests", lambda limit_s: (True, "12 passed in 3.00s"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(kernels.backend, "use", lambda name: None)
    assert kernels.main(["--output", str(tmp_path), "--tests"]) == 1
    text = (tmp_path / "kernels.md").read_text()
    assert "a GPU, " in text
    assert "Copy 0.00 TB/s, matmul 1 TFLOP/s. Tests: 12 passed in 3.00s." in text
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "| small |" in line]
    assert rows[0][4:7] == ["2.0", f"{3 * 64 * 3 * 2 / 1e9 / 2e-6:.0%}", "85%"]
    assert rows[1][2:6] == ["failed: AssertionError", *["not measured"] * 3]
    assert rows[2][4] == "2.0"
    monkeypatch.setattr(kernels, "DEADLINE_S", -1)
    assert kernels.main(["--output", str(tmp_path), "--only", "silu"]) == 0
    assert (tmp_path / "kernels.md").read_text().count("not measured") == 5, "too late for it"


def test_the_tests_run_with_none_of_the_projects_options() -> None:
    passed, said = run_tests(400, ["tests/unit/kernels/test_block_bytes.py"], most_processes=1)
    assert passed
    assert "passed in" in said
    passed, said = run_tests(0.01, ["tests/unit/kernels/test_block_bytes.py"], most_processes=1)
    assert not passed
    assert said.startswith("not at their end")


def test_without_a_gpu_the_table_has_no_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert kernels.main(["--output", str(tmp_path)]) == 0
    assert "no CUDA GPU" in capsys.readouterr().err
    rows = [line for line in (tmp_path / "kernels.md").read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) == len(kernel_cases.all_cases())
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[2:6] == ["not measured"] * 4
        assert cells[7] == "not measured"


def test_the_committed_table_has_the_rows_of_the_cases() -> None:
    table = Path(__file__).resolve().parents[3] / "bench" / "results" / "kernels.md"
    rows = [line.strip("|").split("|")[:2] for line in table.read_text().splitlines() if line.startswith("| ")][1:]
    wanted = [[case.kernel, case.shape] for case in kernel_cases.all_cases()]
    assert [[cell.strip() for cell in row] for row in rows] == wanted
