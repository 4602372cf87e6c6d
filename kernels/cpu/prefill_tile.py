"""The register tiles of attention over staged keys and values: a few queries against a few columns."""

from typing import Any

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import IS_WIDE, cgutils, intrinsic, ir, strict, types
from kvasir.kernels.cpu.simd import LANES, TILE_ROWS
from kvasir.kernels.cpu.softmax import CHAINS
from kvasir.kernels.cpu.tile_code import F32, I64, number

# With the sums of all rows in registers; of scores, all chains of each.
TILE_COLUMNS, SCORE_COLUMNS = (4 * LANES, 2 * LANES) if IS_WIDE else (2 * LANES, LANES)
SCORE_ROWS = 3

_VECTOR = ir.VectorType(F32, LANES)


@intrinsic
def _add_tile(typing: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, depth: Any,
              befores: Any, factors: Any) -> Any:  # fmt: skip
    """c[R, C] = c * befores[R] + a[R, depth] @ b[depth, C] * factors[R], by address, floats a row

    R = TILE_ROWS, C = TILE_COLUMNS
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        *operands, befores, factors = arguments
        tile = _Tile(builder, TILE_ROWS, TILE_COLUMNS, *operands)
        parts = tile.scaled(tile.chains(1)[0], factors)
        tile.store(tile.added(tile.scaled(tile.stored(), befores), parts))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), codegen


@intrinsic
def _score_tile(typing: Any, a: Any, a_stride: Any, b: Any, b_stride: Any, c: Any, c_stride: Any, depth: Any) -> Any:
    """c[R, C] = a[R, depth] @ b[depth, C], each sum in CHAINS

    R = SCORE_ROWS, C = SCORE_COLUMNS, depth: a multiple of CHAINS
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        tile = _Tile(builder, SCORE_ROWS, SCORE_COLUMNS, *arguments)
        sums = tile.chains(CHAINS)
        tile.store(tile.added(tile.added(sums[0], sums[2]), tile.added(sums[1], sums[3])))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 7), codegen


class _Tile:
    """Writes the LLVM code of one tile. `sums` are vectors, row by row."""

    def __init__(self, builder: Any, num_rows: int, num_columns: int, a: Any, a_stride: Any, b: Any, b_stride: Any,
                 c: Any, c_stride: Any, depth: Any) -> None:  # fmt: skip
        self._builder, self._depth = builder, depth
        self._rows, self._vectors = range(num_rows), range(num_columns // LANES)
        self._a, self._b, self._c = a, b, c
        self._a_stride, self._b_stride, self._c_stride = (
            builder.mul(stride, number(4)) for stride in (a_stride, b_stride, c_stride)
        )

    def chains(self, count: int) -> list[list[Any]]:
        """For each of 0 <= first < count: the products of k = first, first + count, ..., added one after the other"""
        builder, width = self._builder, len(self._vectors)
        cells = [[tile_code.empty_cell(builder, _VECTOR) for _ in self._places()] for _ in range(count)]
        with cgutils.for_range_slice(builder, number(0), self._depth, number(count), intp=I64) as (start, _):
            for first, chain in enumerate(cells):
                k = builder.add(start, number(first))
                columns = [builder.load(self._at(self._b, k, self._b_stride, v), align=4) for v in self._vectors]
                for r in self._rows:
                    scalar = self._spread(r, k)
                    for column, cell in zip(columns, chain[r * width : (r + 1) * width], strict=True):
                        tile_code.fuse(builder, cell, scalar, column)
        return [[builder.load(cell) for cell in chain] for chain in cells]

    def added(self, sums: list[Any], others: list[Any]) -> list[Any]:
        return [self._builder.fadd(*pair) for pair in zip(sums, others, strict=True)]

    def scaled(self, sums: list[Any], factors: Any) -> list[Any]:
        """Each row by its own factor, of those at an address"""
        each = [
            tile_code.spread(self._builder, tile_code.load(self._builder, factors, 4 * r, F32), LANES)
            for r in self._rows
        ]
        return [self._builder.fmul(value, each[i // len(self._vectors)]) for i, value in enumerate(sums)]

    def stored(self) -> list[Any]:
        return [self._builder.load(place, align=4) for place in self._places()]

    def store(self, sums: list[Any]) -> None:
        for value, place in zip(sums, self._places(), strict=True):
            self._builder.store(value, place, align=4)

    def _places(self) -> list[Any]:
        return [self._at(self._c, number(r), self._c_stride, v) for r in self._rows for v in self._vectors]

    def _spread(self, r: int, k: Any) -> Any:
        """a[r, k] in all lanes"""
        row = tile_code.row(self._builder, self._a, self._a_stride, number(r))
        value = tile_code.load(self._builder, tile_code.row(self._builder, row, number(4), k), 0, F32)
        return tile_code.spread(self._builder, value, LANES)

    def _at(self, base: Any, row: Any, stride: Any, v: int) -> Any:
        return tile_code.pointer(self._builder, tile_code.row(self._builder, base, stride, row), 4 * LANES * v, _VECTOR)


@strict
def seen(last: Any, begin: Any, group: Any, width: Any) -> Any:
    """How many columns the rows up to `last` need. Row r sees those before begin + r // group + 1"""
    return max(0, min(begin + last // group + 1, width))


@strict
def score(queries: Any, keys: Any, begin: Any, group: Any, width: Any, scores: Any) -> None:
    """scores[R, : width] = queries[R, D] @ keys, where they are seen

    keys: [columns / SCORE_COLUMNS, D, SCORE_COLUMNS]. R is a multiple of SCORE_ROWS, `width` of SCORE_COLUMNS
    """
    for column in range(0, width, SCORE_COLUMNS):
        for row in range(0, queries.shape[0], SCORE_ROWS):
            if seen(row + SCORE_ROWS - 1, begin, group, width) > column:
                _score_tile(
                    queries.ctypes.data + row * queries.strides[0], queries.strides[0] // 4,
                    keys.ctypes.data + column // SCORE_COLUMNS * keys.strides[0], SCORE_COLUMNS,
                    scores.ctypes.data + row * scores.strides[0] + 4 * column, scores.strides[0] // 4, queries.shape[1],
                )  # fmt: skip


@strict
def add_weighted(weights: Any, values: Any, begin: Any, group: Any, width: Any, befores: Any, factors: Any,
                 sums: Any) -> None:  # fmt: skip
    """sums[R, C] = sums * befores[R] + weights[R, : width] @ values[: width, C] * factors[R], of what is seen

    Column by column of the weights. R is a multiple of TILE_ROWS, C of TILE_COLUMNS.
    """
    for first in range(0, sums.shape[1], TILE_COLUMNS):
        for row in range(0, sums.shape[0], TILE_ROWS):
            _add_tile(
                weights.ctypes.data + row * weights.strides[0], weights.strides[0] // 4,
                values.ctypes.data + 4 * first, values.strides[0] // 4,
                sums.ctypes.data + row * sums.strides[0] + 4 * first, sums.strides[0] // 4,
                seen(row + TILE_ROWS - 1, begin, group, width),
                befores.ctypes.data + 4 * row, factors.ctypes.data + 4 * row,
            )  # fmt: skip
