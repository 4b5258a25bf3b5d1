"""Groups of neighbours that share a scale, in a block of several groups: their scales, and the maximum of each group.

A thread holds `VECTOR` neighbours, so a group is a run of lanes of one warp. The values of a group travel by shuffles,
without shared memory and without a barrier:

    load      each thread reads the scale of its group            lanes of a group read the same address
    maximum   over the registers of the thread, then over lanes   1, 2, 4, ... lanes apart
    store     the first lane of each group writes

In between, a value of a group is an array of the block's size: each element has the value of its group. The
interpreter of Pallas knows no lanes; there the same values are made by reshapes.
"""

from typing import Any

import jax.numpy as jnp
import numpy as np

VECTOR = 8
WARP, THREADS = 32, 128  # of a warp and of a warpgroup
BLOCK = THREADS * VECTOR  # elements


def fit(group: int) -> bool:
    """Whether groups of this size are runs of lanes of one warp."""
    lanes = group // VECTOR
    return group % VECTOR == 0 and 0 < lanes <= WARP and WARP % lanes == 0


def load(scales: Any, group: int, *, interpreted: bool) -> Any:
    """The values of the groups of a block, read from the part of memory that holds one for each; for `spread`."""
    if interpreted:
        return scales[...]
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import FragmentedArray, arith, constant, ir, thread_idx, vector

    # One value for each thread. The compiler merges the loads of all leaves only if nothing stands behind them.
    layout = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((THREADS,), scales.dtype, layout=layout)
    )
    def group_load(_: Any, memory: Any) -> Any:
        number = arith.divui(thread_idx(), constant(group // VECTOR, ir.IntegerType.get_signless(32)))
        kind = ir.VectorType.get((1,), memory.type.element_type)
        value = vector.load(kind, memory, [arith.index_cast(ir.IndexType.get(), number)])
        return FragmentedArray(_registers=np.array([value], dtype=object), _layout=layout.to_mgpu(), _is_signed=None)

    return group_load(scales)  # type: ignore


def spread(loaded: Any, layout: Any, group: int, *, interpreted: bool) -> Any:
    """For each element of a block the value of its group, from what `load` returned."""
    if interpreted:
        return _spread(loaded, group)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import FragmentedArray, vector

    one = plgpu.Layout.WG_STRIDED((THREADS,), vec_size=1)

    @plgpu.inline_mgpu(arg_types=(one,), return_type=plgpu.ShapeDtypeStruct((BLOCK,), loaded.dtype, layout=layout))
    def group_spread(_: Any, values: Any) -> Any:
        value = vector.extract(values.registers.flat[0], dynamic_position=[], static_position=[0])
        return FragmentedArray.splat(value, (BLOCK,), layout.to_mgpu())

    return group_spread(loaded)  # type: ignore


def maximum(x: Any, layout: Any, group: int, *, interpreted: bool) -> Any:
    """For each element of a block the maximum of its group, exactly; float32."""
    if interpreted:
        return _spread(jnp.max(x.reshape(-1, group), axis=1), group)
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import FragmentedArray, arith, utils, vector

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((BLOCK,), x.dtype, layout=layout))
    def group_maximum(_: Any, values: Any) -> Any:
        (register,) = values.registers.flat
        most = vector.reduction(values.mlir_dtype, vector.CombiningKind.MAXIMUMF, register)
        distance = 1
        while distance < group // VECTOR:
            most = arith.maximumf(most, utils.shfl_bfly(most, distance))
            distance *= 2
        return FragmentedArray.splat(most, (BLOCK,), values.layout)

    return group_maximum(x)  # type: ignore


def store(scales: Any, x: Any, layout: Any, group: int, *, interpreted: bool) -> None:
    """Writes one value of `x` for each group; `x` has the same value in all elements of a group."""
    if interpreted:
        scales[...] = x.reshape(-1, group)[:, 0]
        return
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import arith, constant, ir, memref, thread_idx, utils, vector, when

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def group_store(_: Any, memory: Any, values: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        lanes, thread = constant(group // VECTOR, i32), thread_idx()
        number = arith.index_cast(ir.IndexType.get(), arith.divui(thread, lanes))
        value = vector.extract(values.registers.flat[0], dynamic_position=[], static_position=[0])
        utils.warp_barrier()  # every lane must read the old value before one writes the new one
        with when(arith.cmpi(arith.CmpIPredicate.eq, arith.remui(thread, lanes), constant(0, i32))):
            memref.store(value, memory, [number])

    group_store(scales, x)  # type: ignore


def _spread(of_groups: Any, group: int) -> Any:
    return jnp.broadcast_to(of_groups[:, None], (of_groups.shape[0], group)).reshape(-1)
