"""The compiled loop that runs other loops one after the other, each on all threads, with a barrier behind each."""

from typing import Any

from kvasir.kernels.cpu.compiling import carray, compiled, intrinsic, ir, loop, types
from kvasir.kernels.cpu.simd import int64_array

_SPINS = 4000  # a few ten microseconds; then others may want this core, perhaps the one that is waited for
_I32, _I64 = ir.IntType(32), ir.IntType(64)


@intrinsic
def _call_loop(typing: Any, address: Any, arguments: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(ir.VoidType(), [_I64.as_pointer()])
        builder.call(
            builder.inttoptr(arguments[0], function.as_pointer()), [builder.inttoptr(arguments[1], _I64.as_pointer())]
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def _call(typing: Any, address: Any) -> Any:
    """int function(void)"""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        function = ir.FunctionType(_I32, [])
        return builder.sext(builder.call(builder.inttoptr(arguments[0], function.as_pointer()), []), _I64)

    return types.int64(types.int64), codegen


@intrinsic
def _add(typing: Any, address: Any) -> Any:
    """(*address)++, atomically; what others wrote before theirs is seen after it."""

    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        place = builder.inttoptr(arguments[0], _I64.as_pointer())
        return builder.atomic_rmw("add", place, ir.Constant(_I64, 1), "acq_rel")

    return types.int64(types.int64), codegen


@intrinsic
def _load(typing: Any, address: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], _I64.as_pointer()), "acquire", 8)

    return types.int64(types.int64), codegen


@intrinsic
def _store(typing: Any, address: Any, value: Any) -> Any:
    def codegen(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        builder.store_atomic(arguments[1], builder.inttoptr(arguments[0], _I64.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@compiled
def _wait_for_all(barrier: Any, num_threads: Any, counter: Any, yield_address: Any) -> None:
    """The last one to come makes the counter of the step 0 again."""
    generation = _load(barrier + 64)
    if _add(barrier) == num_threads - 1:
        _store(counter, 0)
        _store(barrier, 0)
        _store(barrier + 64, generation + 1)
        return
    spins = 0
    while _load(barrier + 64) == generation:
        spins += 1
        if spins > _SPINS:
            _call(yield_address)


@loop
def run(arguments: Any) -> None:
    """[_, number of steps, addresses, argument blocks, words a block, barrier, omp_get_num_threads, sched_yield]"""
    a = carray(arguments, 8)
    addresses = int64_array(a[2], (a[1],))
    num_threads = 1 if a[6] == 0 else _call(a[6])
    for step in range(a[1]):
        block = a[3] + step * a[4] * 8
        _call_loop(addresses[step], block)
        _wait_for_all(a[5], num_threads, block, a[7])
