"""What the register tiles write LLVM code with. Addresses are integers of 64 bits; offsets and strides are bytes."""

from collections.abc import Callable, Iterable
from typing import Any

from kvasir.kernels.cpu.compiling import cgutils, ir

F32, HALF, I8, I16, I32, I64 = ir.FloatType(), ir.HalfType(), *map(ir.IntType, (8, 16, 32, 64))
FUSE = ("contract",)  # of a product and a sum: one fused multiply-add
LINE_BYTES = 64  # of a cache line


def number(value: int) -> Any:
    return ir.Constant(I64, value)


def zeros(vector: Any) -> Any:
    return ir.Constant(vector, None)


def by_number_of_rows(builder: Any, num_rows: Any, sizes: Iterable[int], write: Callable[[int], None]) -> None:
    """What `write` writes for the first of the ascending sizes that num_rows fit in."""
    done = builder.append_basic_block("done")
    for size in sizes:
        here, other = builder.append_basic_block(f"rows{size}"), builder.append_basic_block("more")
        builder.cbranch(builder.icmp_signed("<=", num_rows, number(size)), here, other)
        builder.position_at_end(here)
        write(size)
        builder.branch(done)
        builder.position_at_end(other)
    builder.branch(done)
    builder.position_at_end(done)


def row(builder: Any, base: Any, stride: Any, index: Any) -> Any:
    """The address of one"""
    return builder.add(base, builder.mul(index, stride))


def row_or_last(builder: Any, base: Any, stride: Any, index: int, num_rows: Any) -> Any:
    """The address of one; of the last, where there are not as many"""
    last, wanted = builder.sub(num_rows, number(1)), number(index)
    return row(builder, base, stride, builder.select(builder.icmp_signed("<", wanted, last), wanted, last))


def pointer(builder: Any, address: Any, offset: int, what: Any) -> Any:
    return builder.inttoptr(builder.add(address, number(offset)), what.as_pointer())


def load(builder: Any, address: Any, offset: int, what: Any, align: int = 4) -> Any:
    return builder.load(pointer(builder, address, offset, what), align=align)


def spread(builder: Any, value: Any, lanes: int) -> Any:
    """A vector with `value` in all lanes"""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    one = builder.insert_element(undefined, value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, undefined, zeros(ir.VectorType(I32, lanes)))


def empty_cell(builder: Any, vector: Any) -> Any:
    """A place on the stack for a sum, which compilers keep in a register"""
    cell = cgutils.alloca_once(builder, vector)
    builder.store(zeros(vector), cell)
    return cell


def fuse(builder: Any, cell: Any, a: Any, b: Any) -> None:
    """cell += a * b"""
    builder.store(builder.fadd(builder.load(cell), builder.fmul(a, b, flags=FUSE), flags=FUSE), cell)


def call(builder: Any, name: str, returned: Any, *arguments: Any) -> Any:
    """An intrinsic of LLVM's"""
    function_type = ir.FunctionType(returned, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, function_type, name), arguments)


def fetch(builder: Any, address: Any, cache: int) -> None:
    """Ask for the cache line at `address`, into the first cache or the second: no wait, no fault where nothing is."""
    read, locality, data = (ir.Constant(I32, value) for value in (0, 4 - cache, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address, 0, I8), read, locality, data)


def transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """The columns of as many vectors as each has lanes, a power of 2"""
    size = len(rows)
    halves = [
        ir.Constant(ir.VectorType(I32, size), [first + lane // 2 + lane % 2 * size for lane in range(size)])
        for first in (0, size // 2)
    ]
    for _ in range(size.bit_length() - 1):  # shuffled like cards, each moves to twice its place
        pairs = zip(rows[: size // 2], rows[size // 2 :], strict=True)
        rows = [builder.shuffle_vector(*pair, half) for pair in pairs for half in halves]
    return rows
