"""`kvasir bench kernels`: the cases are right in small, and where there is no GPU, no number is made up."""

from pathlib import Path

import pytest
import torch

from kvasir.bench.lab import kernel_cases, kernel_cases_rows, kernels
from kvasir.bench.lab.kernel_prepared import Prepared

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
