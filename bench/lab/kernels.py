"""`kvasir bench kernels`: each Triton kernel beside what this GPU's memory and tensor cores can do.

The ceilings are measured in the same run: a large copy, and a large product in bfloat16. Each kernel is checked before
it is timed; one that is wrong, or does not run, is named in the table and has no numbers, and the exit status is 1.
Without a GPU the table says so, and nothing else. All of it takes less than ten minutes, with the tests or without.
"""

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

import torch

from kvasir.bench.lab.kernel_case import Case
from kvasir.bench.lab.kernel_cases import all_cases
from kvasir.bench.lab.kernel_tests import run_tests
from kvasir.bench.lab.page import lab_parser
from kvasir.bench.markdown import table
from kvasir.kernels import backend

NOT_MEASURED = "not measured"
FAILED = "failed"
DEADLINE_S = 540  # cases that have not begun by then are left out, and the table says so
TESTS_LIMIT_S = 270
COPIED_BYTES = 4 << 30
MATMUL_SIZE = 8192
HEADER = "kernel | shape | must move or do | floor, us | measured, us | share | wanted | beside, us"


@dataclass(frozen=True)
class Ceilings:
    copy_bytes_per_s: float
    matmul_flops_per_s: float


def median_s(run: object) -> float:
    """Each time with a cold cache."""
    from triton.testing import do_bench

    return float(do_bench(run, warmup=50, rep=200, return_mode="median")) * 1e-3


def measure_ceilings(device: str) -> Ceilings:
    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_s = median_s(lambda: target.copy_(source))
    a, b = torch.randn(2, MATMUL_SIZE, MATMUL_SIZE, device=device).bfloat16()
    return Ceilings(2 * COPIED_BYTES / copy_s, 2 * MATMUL_SIZE**3 / median_s(lambda: a @ b))


def measured(case: Case, ceilings: Ceilings, device: str) -> list[str]:
    """The cells after kernel and shape"""
    torch.manual_seed(7)
    prepared = case.make(device)
    prepared.run()
    prepared.check()
    time_s = median_s(prepared.run)
    if case.bound == "copy":
        amount, floor_s = f"{prepared.amount / 1e6:,.1f} MB", prepared.amount / ceilings.copy_bytes_per_s
    else:
        amount, floor_s = f"{prepared.amount / 1e9:,.1f} GFLOP", prepared.amount / ceilings.matmul_flops_per_s
    beside = "" if prepared.beside is None else f"{median_s(prepared.beside) * 1e6:,.1f}"
    times_us = f"{floor_s * 1e6:,.1f}", f"{time_s * 1e6:,.1f}"
    return [amount, *times_us, f"{floor_s / time_s:.0%}", wanted_of(case), beside]


def unmeasured(case: Case) -> list[str]:
    return [*[NOT_MEASURED] * 4, wanted_of(case), NOT_MEASURED]


def wanted_of(case: Case) -> str:
    return "" if case.wanted is None else f"{case.wanted:.0%}"


def as_markdown(about: str, rows: list[list[str]]) -> str:
    lines = [
        "# Triton kernels, in the shapes of an 8B model, bfloat16",
        "",
        about,
        "",
        "The floor is what must be read and written at the speed of a large copy, or computed at that of a large",
        "product, both of the same run; the share is floor / measured. Beside prefill attention: torch's flash",
        "attention, on keys and values in one piece. Made by `kvasir bench kernels`.",
        "",
    ]
    return "\n".join([*lines, *table(HEADER, rows, num_texts=2), ""])


def main(argv: list[str]) -> int:
    started_s = time.monotonic()
    parser = lab_parser("kernels", __doc__)
    parser.add_argument("--only", default="", metavar="NAME", help="kernels whose name begins so (default: all)")
    parser.add_argument("--tests", action="store_true", help="first the tests of kernels and engine on the GPU")
    options = parser.parse_args(argv)
    cases = [case for case in all_cases() if case.kernel.startswith(options.only)]
    options.output.mkdir(parents=True, exist_ok=True)

    def write(about: str, rows: list[list[str]]) -> None:
        """After each case, so that a run that is cut short leaves what it has"""
        rest = [[case.kernel, case.shape, *unmeasured(case)] for case in cases[len(rows) :]]
        (options.output / "kernels.md").write_text(as_markdown(about, rows + rest), encoding="utf-8")

    is_right = True
    if torch.cuda.is_available():
        passed, about = run_tests(TESTS_LIMIT_S) if options.tests else (True, "")
        is_right = measure_all(cases, "cuda", started_s + DEADLINE_S, f" Tests: {about}." if about else "", write)
        is_right = is_right and passed
    else:
        print("There is no CUDA GPU here: nothing is measured.", file=sys.stderr)
        write("No GPU: not measured.", [])
    print((options.output / "kernels.md").read_text(encoding="utf-8"))
    return 0 if is_right else 1


def measure_all(
    cases: list[Case], device: str, deadline_s: float, tests: str, write: Callable[[str, list[list[str]]], None]
) -> bool:
    """Whether all that was measured was right"""
    backend.use("triton")
    ceilings = measure_ceilings(device)
    about = (
        f"{torch.cuda.get_device_name()}, {date.today().isoformat()}, torch {torch.__version__}. "
        f"Copy {ceilings.copy_bytes_per_s / 1e12:.2f} TB/s, matmul {ceilings.matmul_flops_per_s / 1e12:.0f} TFLOP/s."
        f"{tests}"
    )
    rows: list[list[str]] = []
    with torch.inference_mode():
        for case in cases:
            cells = unmeasured(case) if time.monotonic() > deadline_s else measured_or_failed(case, ceilings, device)
            rows.append([case.kernel, case.shape, *cells])
            write(about, rows)
            print(f"{case.kernel}, {case.shape}: {cells[2]} us", file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    return not any(FAILED in row[2] for row in rows)


def measured_or_failed(case: Case, ceilings: Ceilings, device: str) -> list[str]:
    """Of a kernel that is wrong no time is of interest; the others' are."""
    try:
        return measured(case, ceilings, device)
    except Exception as error:
        traceback.print_exc()
        return [f"{FAILED}: {type(error).__name__}", *[NOT_MEASURED] * 3, wanted_of(case), NOT_MEASURED]


if __name__ == "__main__":  # where nothing but torch is installed
    sys.exit(main(sys.argv[1:]))
