"""The register tiles of attention over rows of a paged cache: up to TILE_ROWS queries against keys, or values, that lie
anywhere. Each row of the cache is loaded, and widened to float32, once for all of these queries.

All is added up in the order of `softmax`.
"""

from typing import Any

from kvasir.kernels.cpu import tile_code
from kvasir.kernels.cpu.compiling import cgutils, intrinsic, ir, types
from kvasir.kernels.cpu.simd import LANES, TILE_ROWS, as_floats
from kvasir.kernels.cpu.softmax import CHAINS
from kvasir.kernels.cpu.tile_code import F32, I32, I64, LINE_BYTES, number

_TOGETHER = 2  # vectors of scores: their sums, of TILE_ROWS rows each, stay in registers
_ROWS = range(1, TILE_ROWS + 1)


@intrinsic
def score_keys(
    typing: Any, queries: Any, query_stride: Any, num_rows: Any, like: Any, keys: Any, offset: Any, depth: Any,
    ahead: Any, scores: Any, score_stride: Any,
) -> Any:  # fmt: skip
    """scores[R, LANES] = queries[R, depth] @ (LANES keys [depth]).T, by address. R <= TILE_ROWS

    keys: address of the addresses of the keys, which are of the type of the array `like`; each lies `offset` behind
    ahead: address of the addresses of as many rows, which are fetched into the cache, `offset` behind too
    depth: a multiple of CHAINS      strides: floats a row
    """

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        queries, query_stride, num_rows, _, keys, offset, depth, ahead, scores, score_stride = arguments
        tile = _Tile(builder, context, like.dtype, offset)

        def multiply(count: int) -> None:
            sums = tile.scores(count, queries, query_stride, keys, depth, ahead)
            for r, total in enumerate(sums):
                builder.store(total, tile.floats_at(scores, r, score_stride), align=4)

        tile_code.by_number_of_rows(builder, num_rows, _ROWS, multiply)
        return context.get_dummy_value()

    i64 = types.int64
    return types.void(i64, i64, i64, like, i64, i64, i64, i64, i64, i64), codegen


def _adds_values(num_vectors: int, lanes: int = LANES) -> Any:
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
            tile = _Tile(builder, context, like.dtype, offset, lanes)

            def multiply(rows: int) -> None:
                places = [[tile.floats_at(sums, r, sum_stride, v) for v in range(num_vectors)] for r in range(rows)]
                tile.add(places, weights, weight_stride, values, first, count, ahead)

            tile_code.by_number_of_rows(builder, num_rows, _ROWS, multiply)
            return context.get_dummy_value()

        i64 = types.int64
        return types.void(i64, i64, i64, like, *[i64] * 7), codegen

    return intrinsic(add_values)


VECTORS = 4 if LANES == 16 else 2  # whose sums for TILE_ROWS rows stay in registers
add_columns = _adds_values(VECTORS)  # C = VECTORS * LANES
add_vector = _adds_values(1)  # C = LANES
add_few = _adds_values(1, CHAINS)  # C = CHAINS


class _Tile:
    """Writes the LLVM code of one tile."""

    def __init__(self, builder: Any, context: Any, dtype: Any, offset: Any, lanes: int = LANES) -> None:
        self._builder, self._dtype, self._offset = builder, dtype, offset
        self._bytes = context.get_abi_sizeof(context.get_value_type(dtype))
        self._lanes, self._vector = lanes, ir.VectorType(F32, lanes)
        self._narrow = ir.VectorType(context.get_value_type(dtype), lanes)

    def scores(self, rows: int, queries: Any, query_stride: Any, keys: Any, depth: Any, ahead: Any) -> list[Any]:
        """A vector of scores for each row."""
        builder = self._builder
        # A loop, and memory between its rounds: unrolled, the sums of all rounds would want registers at once.
        parts = cgutils.alloca_once(builder, ir.ArrayType(self._vector, rows * CHAINS))
        parts, width = builder.ptrtoint(parts, I64), number(CHAINS * LANES)
        end, step = number(CHAINS), number(_TOGETHER)
        with cgutils.for_range_slice(builder, number(0), end, step, intp=I64) as (first, _):
            column = builder.mul(first, number(LANES))
            for r, row in enumerate(self._chains(rows, queries, query_stride, keys, first, depth, ahead)):
                for i, sums in enumerate(row):
                    builder.store(sums, self.floats_at(parts, r, width, i, column), align=4)
        places = [[self.floats_at(parts, r, width, i) for i in range(CHAINS)] for r in range(rows)]
        return [self._fold([builder.load(place, align=4) for place in row]) for row in places]

    def _chains(
        self, rows: int, queries: Any, query_stride: Any, keys: Any, first: Any, depth: Any, ahead: Any
    ) -> list[list[Any]]:
        """For each row _TOGETHER vectors. The i-th: of the keys first + i, first + i + CHAINS, ... the sums of chains

        Keys are turned before they are widened, which takes half or a quarter of the shuffles.
        """
        builder = self._builder
        cells = [[tile_code.empty_cell(builder, self._vector) for _ in range(_TOGETHER)] for _ in range(rows)]
        places = [
            [self._row_at(keys, builder.add(first, number(start + i))) for start in range(0, LANES, CHAINS)]
            for i in range(_TOGETHER)
        ]

        def add(vectors: list[Any], d: Any) -> None:
            for r, row in enumerate(cells):
                query = self._repeated(self.floats_at(queries, r, query_stride, 0, d))
                for cell, vector in zip(row, vectors, strict=True):
                    tile_code.fuse(builder, cell, query, vector)

        whole = builder.and_(depth, number(-LANES))
        with cgutils.for_range_slice(builder, number(0), whole, number(LANES), intp=I64) as (d, _):
            self._fetch_rows(ahead, first, d)
            turned = [self._turned([self._narrow_at(place, d) for place in group]) for group in places]
            for k, vectors in enumerate(zip(*turned, strict=True)):
                add([self._widened(vector) for vector in vectors], builder.add(d, number(k * CHAINS)))
        with cgutils.for_range_slice(builder, whole, depth, number(CHAINS), intp=I64) as (d, _):
            add([self._side_by_side(group, d) for group in places], d)
        return [[builder.load(cell) for cell in row] for row in cells]

    def _turned(self, vectors: list[Any]) -> list[Any]:
        """As many vectors: the first CHAINS lanes of each, the next ones of each, ..."""
        for _ in range((len(vectors) - 1).bit_length()):
            pairs = list(zip(vectors[::2], vectors[1::2], strict=True))
            vectors = [self._every_other(*pair, first) for first in range(2) for pair in pairs]
        return vectors

    def _every_other(self, one: Any, other: Any, first: int) -> Any:
        """A vector: of two, every other CHAINS lanes"""
        lanes = [start + k for start in range(first * CHAINS, 2 * LANES, 2 * CHAINS) for k in range(CHAINS)]
        return self._builder.shuffle_vector(one, other, ir.Constant(ir.VectorType(I32, LANES), lanes))

    def _side_by_side(self, places: list[Any], d: Any) -> Any:
        """CHAINS dimensions of each of these rows, as one vector of floats"""
        builder = self._builder
        few = ir.VectorType(self._narrow.element, CHAINS)
        parts = [builder.load(self._pointer(place, d, self._bytes, few), align=self._bytes) for place in places]
        while len(parts) > 1:
            lanes = ir.Constant(ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count)))
            parts = [builder.shuffle_vector(*pair, lanes) for pair in zip(parts[::2], parts[1::2], strict=True)]
        return as_floats(builder, self._dtype, parts[0], LANES)

    def _repeated(self, pointer: Any) -> Any:
        """CHAINS floats, as often as they fit in a vector"""
        builder, few = self._builder, ir.VectorType(F32, CHAINS)
        values = builder.load(builder.bitcast(pointer, few.as_pointer()), align=4)
        lanes = ir.Constant(ir.VectorType(I32, LANES), [lane % CHAINS for lane in range(LANES)])
        return builder.shuffle_vector(values, ir.Constant(few, ir.Undefined), lanes)

    def add(self, places: list[list[Any]], weights: Any, weight_stride: Any, values: Any, first: Any, count: Any,
            ahead: Any) -> None:  # fmt: skip
        builder = self._builder
        cells = [[tile_code.empty_cell(builder, self._vector) for _ in row] for row in places]
        pairs = [pair for row in zip(places, cells, strict=True) for pair in zip(*row, strict=True)]
        for place, cell in pairs:
            builder.store(builder.load(place, align=4), cell)
        num_vectors = len(places[0])
        with cgutils.for_range(builder, count, intp=I64) as loop:
            self._fetch_columns(self._row_at(ahead, loop.index), first, num_vectors)
            row_of_values = self._row_at(values, loop.index)
            columns = [builder.add(first, number(v * self._lanes)) for v in range(num_vectors)]
            vectors = [self._load(row_of_values, column) for column in columns]
            for r, row in enumerate(cells):
                weight = self._weight(weights, r, weight_stride, loop.index)
                for vector, cell in zip(vectors, row, strict=True):
                    tile_code.fuse(builder, cell, weight, vector)
        for place, cell in pairs:
            builder.store(builder.load(cell), place, align=4)

    def floats_at(self, address: Any, r: int, stride: Any, v: int = 0, more: Any = None) -> Any:
        """Pointer to a vector: row r, vector v, `more` floats behind"""
        offset = tile_code.row(self._builder, number(v * self._lanes), stride, number(r))
        if more is not None:
            offset = self._builder.add(offset, more)
        return self._pointer(address, offset, 4, self._vector)

    def _weight(self, weights: Any, r: int, stride: Any, k: Any) -> Any:
        """weights[r, k] in all lanes"""
        place = self._pointer(weights, tile_code.row(self._builder, k, stride, number(r)), 4, F32)
        return tile_code.spread(self._builder, self._builder.load(place, align=4), self._lanes)

    def _fold(self, sums: list[Any]) -> Any:
        """CHAINS vectors, of each key all chains side by side -> one, of each key (0 + 2) + (1 + 3)

        Where a lane's number has the bit `distance`, it is of the second half of `sums`: most stays in its lane.
        """
        builder, distance = self._builder, CHAINS // 2
        while len(sums) > 1:
            kept = [i + (LANES if i & distance else 0) for i in range(LANES)]
            moved = [i + (LANES - distance if i & distance else distance) for i in range(LANES)]
            masks = [ir.Constant(ir.VectorType(I32, LANES), order) for order in (kept, moved)]
            half = len(sums) // 2
            sums = [
                builder.fadd(*(builder.shuffle_vector(one, other, mask) for mask in masks))
                for one, other in zip(sums[:half], sums[half:], strict=True)
            ]
            distance //= 2
        return sums[0]

    def _fetch_rows(self, ahead: Any, first: Any, d: Any) -> None:
        """The rows ahead of those that are taken with `first`: some of them at each d, so that all lines are asked for
        evenly. A processor waits for room for what it asks for, and computes little beyond that place meanwhile."""
        builder, num_rows = self._builder, _TOGETHER * LANES // CHAINS
        num_turns = min(num_rows, LINE_BYTES // (LANES * self._bytes))  # while d is in one line
        turn = builder.and_(builder.udiv(d, number(LANES)), number(num_turns - 1))
        start = builder.mul(first, number(LANES // CHAINS))
        start = builder.add(start, builder.mul(turn, number(num_rows // num_turns)))
        for i in range(num_rows // num_turns):
            self._fetch(self._row_at(ahead, builder.add(start, number(i))), d)

    def _fetch_columns(self, row: Any, first: Any, num_vectors: int) -> None:
        for line in range(0, num_vectors * self._lanes * self._bytes, LINE_BYTES):
            self._fetch(row, self._builder.add(first, number(line // self._bytes)))

    def _fetch(self, row: Any, column: Any) -> None:
        tile_code.fetch(self._builder, tile_code.row(self._builder, row, number(self._bytes), column), cache=2)

    def _load(self, row: Any, column: Any) -> Any:
        return self._widened(self._narrow_at(row, column))

    def _narrow_at(self, row: Any, column: Any) -> Any:
        return self._builder.load(self._pointer(row, column, self._bytes, self._narrow), align=self._bytes)

    def _widened(self, values: Any) -> Any:
        return as_floats(self._builder, self._dtype, values, self._lanes)

    def _row_at(self, addresses: Any, index: Any) -> Any:
        return self._builder.add(self._builder.load(self._pointer(addresses, index, 8, I64), align=8), self._offset)

    def _pointer(self, address: Any, index: Any, size: int, what: Any) -> Any:
        return tile_code.pointer(self._builder, tile_code.row(self._builder, address, number(size), index), 0, what)
