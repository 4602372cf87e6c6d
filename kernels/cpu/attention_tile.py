"""The register tiles of attention over rows of a paged cache: up to TILE_ROWS queries against keys, or values, that lie
anywhere. Each row of the cache is loaded, and widened to float32, once for all of these queries.
"""

from collections.abc import Callable
from typing import Any

from kvasir.kernels.cpu.compiling import cgutils, intrinsic, ir, types
from kvasir.kernels.cpu.simd import LANES, TILE_ROWS, as_floats

_LINE_BYTES = 64
_LANES_OF_A_SHUFFLE = 4  # 128 bits
_FUSE = ("contract",)
_F32, _I8, _I32, _I64 = ir.FloatType(), ir.IntType(8), ir.IntType(32), ir.IntType(64)
_VECTOR = ir.VectorType(_F32, LANES)


@intrinsic
def score_keys(
    typing: Any, queries: Any, query_stride: Any, num_rows: Any, like: Any, keys: Any, offset: Any, depth: Any,
    ahead: Any, scores: Any, score_stride: Any,
) -> Any:  # fmt: skip
    """scores[R, LANES] = queries[R, depth] @ (LANES keys [depth]).T, by address. R <= TILE_ROWS

    keys: address of the addresses of the keys, which are of the type of the array `like`; each lies `offset` behind
    ahead: address of the addresses of as many rows, which are fetched into the cache, `offset` behind too
    depth: whole vectors of it count, what is behind does not      strides: floats a row
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, query_stride, num_rows, _, keys, offset, depth, ahead, scores, score_stride = arguments
        tile = _Tile(builder, context, like.dtype, offset)

        def multiply(count: int) -> None:
            sums = tile.scores(count, queries, query_stride, keys, depth, ahead)
            for r, total in enumerate(sums):
                builder.store(total, tile.floats_at(scores, r, score_stride), align=4)

        _by_number_of_rows(builder, num_rows, multiply)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, like, i64, i64, i64, i64, i64, i64), codegen


def _adds_values(num_vectors: int) -> Any:
    def add_values(
        typing: Any, weights: Any, weight_stride: Any, num_rows: Any, like: Any, values: Any, offset: Any, first: Any,
        count: Any, ahead: Any, sums: Any, sum_stride: Any,
    ) -> Any:  # fmt: skip
        """sums[R, C] += weights[R, count] @ values[count, first : first + C], by address. R <= TILE_ROWS

        values: address of the addresses of the rows, of the type of the array `like`; each lies `offset` behind
        ahead: address of the addresses of as many rows, of which the same columns are fetched into the cache
        """

        def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            weights, weight_stride, num_rows, _, values, offset, first, count, ahead, sums, sum_stride = arguments
            tile = _Tile(builder, context, like.dtype, offset)

            def multiply(rows: int) -> None:
                places = [[tile.floats_at(sums, r, sum_stride, v) for v in range(num_vectors)] for r in range(rows)]
                tile.add(places, weights, weight_stride, values, first, count, ahead)

            _by_number_of_rows(builder, num_rows, multiply)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, i64, like, *[i64] * 7), codegen

    return intrinsic(add_values)


VECTORS = 4 if LANES == 16 else 2  # whose sums for TILE_ROWS rows stay in registers
add_columns = _adds_values(VECTORS)  # C = VECTORS * LANES
add_vector = _adds_values(1)  # C = LANES


def _by_number_of_rows(builder: Any, num_rows: Any, write: Callable[[int], None]) -> None:
    done = builder.append_basic_block("done")
    for rows in range(1, TILE_ROWS + 1):
        here, other = builder.append_basic_block(f"rows{rows}"), builder.append_basic_block("more")
        builder.cbranch(builder.icmp_signed("==", num_rows, ir.Constant(_I64, rows)), here, other)
        builder.position_at_end(here)
        write(rows)
        builder.branch(done)
        builder.position_at_end(other)
    builder.branch(done)
    builder.position_at_end(done)


class _Tile:
    """Writes the LLVM code of one tile."""

    def __init__(self, builder: Any, context: Any, dtype: Any, offset: Any) -> None:
        self._builder, self._dtype, self._offset = builder, dtype, offset
        self._bytes = context.get_abi_sizeof(context.get_value_type(dtype))
        self._narrow = ir.VectorType(context.get_value_type(dtype), LANES)

    def scores(self, rows: int, queries: Any, query_stride: Any, keys: Any, depth: Any, ahead: Any) -> list[Any]:
        """A vector of scores for each row."""
        builder = self._builder
        end = builder.and_(depth, ir.Constant(_I64, -LANES))
        # One loop, and memory between its rounds: unrolled, the sums of all rounds would want registers at once.
        parts = cgutils.alloca_once(builder, ir.ArrayType(_VECTOR, rows * _LANES_OF_A_SHUFFLE))
        parts = builder.ptrtoint(parts, _I64)
        width = ir.Constant(_I64, _LANES_OF_A_SHUFFLE * LANES)
        with cgutils.for_range(builder, ir.Constant(_I64, _LANES_OF_A_SHUFFLE), intp=_I64) as loop:
            column = builder.mul(loop.index, ir.Constant(_I64, LANES))
            self._fetch_rows(ahead, loop.index, depth)
            for r, total in enumerate(self._partial_scores(rows, queries, query_stride, keys, loop.index, end)):
                builder.store(total, self.floats_at(parts, r, width, 0, column), align=4)
        return [
            self._fold(
                [builder.load(self.floats_at(parts, r, width, j), align=4) for j in range(_LANES_OF_A_SHUFFLE)],
                _LANES_OF_A_SHUFFLE // 2,
            )
            for r in range(rows)
        ]

    def _partial_scores(self, rows: int, queries: Any, query_stride: Any, keys: Any, first: Any, end: Any) -> list[Any]:
        """For each row a vector of the scores of keys `first`, first + 4, ..., each as 4 parts of its sum."""
        builder = self._builder
        indices = [builder.add(first, ir.Constant(_I64, i)) for i in range(0, LANES, _LANES_OF_A_SHUFFLE)]
        places = [self._row_at(keys, i) for i in indices]
        cells = [[self._cell() for _ in indices] for _ in range(rows)]
        zero, step = ir.Constant(_I64, 0), ir.Constant(_I64, LANES)
        with cgutils.for_range_slice(builder, zero, end, step, intp=_I64) as (d, _):
            vectors = [self._load(place, d) for place in places]
            for r, row in enumerate(cells):
                query = builder.load(self.floats_at(queries, r, query_stride, 0, d), align=4)
                for vector, cell in zip(vectors, row, strict=True):
                    self._fuse(cell, query, vector)
        return [self._fold([builder.load(cell) for cell in row], LANES // 2) for row in cells]

    def add(self, places: list[list[Any]], weights: Any, weight_stride: Any, values: Any, first: Any, count: Any,
            ahead: Any) -> None:  # fmt: skip
        builder = self._builder
        cells = [[self._cell() for _ in row] for row in places]
        pairs = [pair for row in zip(places, cells, strict=True) for pair in zip(*row, strict=True)]
        for place, cell in pairs:
            builder.store(builder.load(place, align=4), cell)
        num_vectors = len(places[0])
        with cgutils.for_range(builder, count, intp=_I64) as loop:
            self._fetch_columns(self._row_at(ahead, loop.index), first, num_vectors)
            row_of_values = self._row_at(values, loop.index)
            columns = [builder.add(first, ir.Constant(_I64, v * LANES)) for v in range(num_vectors)]
            vectors = [self._load(row_of_values, column) for column in columns]
            for r, row in enumerate(cells):
                weight = self._spread(self._scalar_at(weights, r, weight_stride, loop.index))
                for vector, cell in zip(vectors, row, strict=True):
                    self._fuse(cell, weight, vector)
        for place, cell in pairs:
            builder.store(builder.load(cell), place, align=4)

    def floats_at(self, address: Any, r: int, stride: Any, v: int = 0, more: Any = None) -> Any:
        """Pointer to a vector: row r, vector v, `more` floats behind"""
        offset = self._builder.add(self._builder.mul(stride, ir.Constant(_I64, r)), ir.Constant(_I64, v * LANES))
        if more is not None:
            offset = self._builder.add(offset, more)
        return self._pointer(address, offset, 4, _VECTOR)

    def _scalar_at(self, address: Any, r: int, stride: Any, k: Any) -> Any:
        offset = self._builder.add(self._builder.mul(stride, ir.Constant(_I64, r)), k)
        return self._builder.load(self._pointer(address, offset, 4, _F32), align=4)

    def _fold(self, sums: list[Any], distance: int) -> Any:
        """Adds up what is `distance` lanes apart in each vector, then half as far, ..., till all fit in one vector.

        Where a lane's number has the bit `distance`, it is of the second half of `sums`: most stays in its lane.
        """
        builder = self._builder
        while len(sums) > 1:
            kept = [i + (LANES if i & distance else 0) for i in range(LANES)]
            moved = [i + (LANES - distance if i & distance else distance) for i in range(LANES)]
            masks = [ir.Constant(ir.VectorType(_I32, LANES), order) for order in (kept, moved)]
            half = len(sums) // 2
            sums = [
                builder.fadd(*(builder.shuffle_vector(one, other, mask) for mask in masks))
                for one, other in zip(sums[:half], sums[half:], strict=True)
            ]
            distance //= 2
        return sums[0]

    def _fetch_rows(self, ahead: Any, first: Any, depth: Any) -> None:
        """Rows `first`, first + 4, ... of a vector's worth of them"""
        builder = self._builder
        places = [
            self._row_at(ahead, builder.add(first, ir.Constant(_I64, i))) for i in range(0, LANES, _LANES_OF_A_SHUFFLE)
        ]
        step = ir.Constant(_I64, _LINE_BYTES // self._bytes)
        with cgutils.for_range_slice(builder, ir.Constant(_I64, 0), depth, step, intp=_I64) as (d, _):
            for place in places:
                self._fetch(place, d)

    def _fetch_columns(self, row: Any, first: Any, num_vectors: int) -> None:
        for line in range(0, num_vectors * LANES * self._bytes, _LINE_BYTES):
            self._fetch(row, self._builder.add(first, ir.Constant(_I64, line // self._bytes)))

    def _fetch(self, row: Any, column: Any) -> None:
        builder, pointer = self._builder, _I8.as_pointer()
        function = builder.module.globals.get("llvm.prefetch.p0") or ir.Function(
            builder.module, ir.FunctionType(ir.VoidType(), [pointer, _I32, _I32, _I32]), "llvm.prefetch.p0"
        )
        address = self._pointer(row, column, self._bytes, _I8)
        builder.call(function, [address, *(ir.Constant(_I32, value) for value in (0, 2, 1))])

    def _load(self, row: Any, column: Any) -> Any:
        values = self._builder.load(self._pointer(row, column, self._bytes, self._narrow), align=self._bytes)
        return as_floats(self._builder, self._dtype, values, LANES)

    def _row_at(self, addresses: Any, index: Any) -> Any:
        return self._builder.add(self._builder.load(self._pointer(addresses, index, 8, _I64), align=8), self._offset)

    def _pointer(self, address: Any, index: Any, size: int, what: Any) -> Any:
        byte = self._builder.add(address, self._builder.mul(index, ir.Constant(_I64, size)))
        return self._builder.inttoptr(byte, what.as_pointer())

    def _cell(self) -> Any:
        cell = cgutils.alloca_once(self._builder, _VECTOR)
        self._builder.store(ir.Constant(_VECTOR, None), cell)
        return cell

    def _spread(self, scalar: Any) -> Any:
        undefined, lane = ir.Constant(_VECTOR, ir.Undefined), ir.Constant(_I32, 0)
        everywhere = ir.Constant(ir.VectorType(_I32, LANES), None)
        return self._builder.shuffle_vector(
            self._builder.insert_element(undefined, scalar, lane), undefined, everywhere
        )

    def _fuse(self, cell: Any, a: Any, b: Any) -> None:
        """cell += a * b"""
        builder = self._builder
        builder.store(builder.fadd(builder.load(cell), builder.fmul(a, b, flags=_FUSE), flags=_FUSE), cell)
