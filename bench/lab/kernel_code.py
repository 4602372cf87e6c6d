"""Compiles the Triton kernels for GPUs that need not be here, and says what the machine code is like.

    python -m kvasir.bench.lab.kernel_code                         a table, to standard output
    python -m kvasir.bench.lab.kernel_code --only write_kv --arch 90 --dtype bfloat16

The launchers run as in the engine, on tensors without memory; what they would launch is compiled instead. Columns:

    registers     of a thread; 255 is all there is
    spills        loads and stores of registers that went to memory, in the machine code; should be 0
    shared        KB of shared memory of a program
    loads         instructions that read global memory 16 bytes at a time, and narrower ones; a narrow one in a loop
                  over keys is a fault, one for a length or a block number is none
    stores        the same of stores
    products      instructions of the tensor cores
"""

import argparse
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from tempfile import NamedTemporaryFile
from typing import Any
from unittest import mock

os.environ["TRITON_INTERPRET"] = "0"  # interpreted kernels have no machine code

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from kvasir.bench.lab.kernel_launches import LAUNCHES
from kvasir.kernels.triton import device

TYPES = {
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.int8: "i8", torch.uint8: "u8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint32: "u32", torch.uint64: "u64", torch.bool: "i1", torch.float8_e4m3fn: "fp8e4nv",
}  # fmt: skip
OPTIONS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "enable_fp_fusion")


@dataclass(frozen=True)
class Launched:
    kernel: JITFunction[Any]
    arguments: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Code:
    registers: int
    spills: int
    shared_bytes: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    products: int


@contextmanager
def recorded(arch: int) -> Iterator[list[Launched]]:
    """While it lasts, the GPU is a certain one, and a launch is written down and does nothing."""
    launches: list[Launched] = []

    def run(self: JITFunction[Any], *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in OPTIONS if name in kwargs}
        launches.append(Launched(self, self.signature.bind(*args, **kwargs).arguments, options))

    with mock.patch.object(JITFunction, "run", run), mock.patch.object(device, "capability", return_value=arch):
        yield launches


def compile_launch(launch: Launched, arch: int) -> Any:
    """As Triton does at a first launch: integers that are 1 become constants, multiples of 16 are promised."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments.get(parameter.name, parameter.default)
        is_integer = isinstance(value, int) and not isinstance(value, bool)
        if parameter.is_constexpr or value is None or (is_integer and value == 1 and not parameter.do_not_specialize):
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i1" if isinstance(value, bool) else "i32" if value < 2**31 else "i64"
        is_promised = not parameter.do_not_specialize and not parameter.do_not_specialize_on_alignment
        if is_promised and (isinstance(value, torch.Tensor) or (is_integer and value % 16 == 0)):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(launch.kernel, signature, constexprs=constants, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=launch.options)


def inspect(compiled: Any) -> Code:
    """Counts in the machine code."""
    usage, instructions = _disassembled(compiled.asm["cubin"])
    found = re.search(r"REG:(\d+)", usage)
    assert found is not None, usage

    def count(pattern: str) -> int:
        return len(re.findall(pattern, instructions))

    loads, stores = count(r"\bLDG(STS)?\."), count(r"\bSTG\.")
    wide_loads, wide_stores = count(r"\bLDG(?:STS)?\.[\w.]*128"), count(r"\bSTG\.[\w.]*128")
    return Code(
        registers=int(found[1]),
        spills=count(r"\b(?:LDL|STL)\b"),
        shared_bytes=int(compiled.metadata.shared),
        wide_loads=wide_loads,
        narrow_loads=loads - wide_loads,
        wide_stores=wide_stores,
        narrow_stores=stores - wide_stores,
        products=count(r"\b(?:HMMA|HGMMA|IMMA|QGMMA|IGMMA)\."),
    )


def _disassembled(cubin: bytes) -> tuple[str, str]:
    """-> resource usage, machine code"""
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = knobs.nvidia.cuobjdump.path
        run = [
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True, timeout=600).stdout
            for option in ("-res-usage", "-sass")
        ]
    return run[0], run[1]


def launches_of(name: str, dtype: torch.dtype, arch: int) -> list[Launched]:
    with recorded(arch) as launches:
        LAUNCHES[name](dtype)
    assert launches, f"{name} launches nothing"
    return launches


def rows(names: list[str], archs: list[int], dtypes: list[torch.dtype]) -> Iterator[str]:
    yield "| launch | kernel | type | GPU | registers | spills | shared | loads 16 B + narrow | stores | products |"
    yield "| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"
    for name in names:
        for dtype in dtypes:
            for arch in archs:
                for launch in launches_of(name, dtype, arch):
                    code = inspect(compile_launch(launch, arch))
                    yield (
                        f"| {name} | `{launch.kernel.__name__.strip('_')}` | {TYPES[dtype]} | sm_{arch} "
                        f"| {code.registers} | {code.spills} | {code.shared_bytes / 1024:.0f} KB "
                        f"| {code.wide_loads} + {code.narrow_loads} | {code.wide_stores} + {code.narrow_stores} "
                        f"| {code.products} |"
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What the machine code of the Triton kernels is like.")
    parser.add_argument("--only", default="", help="launches whose name begins so")
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90])
    parser.add_argument("--dtype", nargs="+", default=["float16", "bfloat16"])
    arguments = parser.parse_args()
    names = [name for name in LAUNCHES if name.startswith(arguments.only)]
    for row in rows(names, arguments.arch, [getattr(torch, dtype) for dtype in arguments.dtype]):
        print(row, flush=True)


if __name__ == "__main__":
    main()
