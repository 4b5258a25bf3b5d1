"""Loads and stores of a block of a leaf, as wide as the block is aligned.

The compiler chooses the width of a load or a store by the alignment that it can prove. For one leaf it proves 16 bytes.
For several leaves it merges the loads of all branches of the switch into one load from a pointer that the branch chose,
and some of the stores too. It knows nothing about that pointer, and loads element by element. Here each load and store
carries its alignment, and keeps it if it is merged.

Blocks begin at multiples of their size, and buffers of XLA at multiples of 16 bytes, so the elements that a thread
takes at once are aligned to their own bytes. The interpreter of Pallas does not know these operations.
"""

from typing import Any

import jax.numpy as jnp

WIDEST = 16  # bytes of the widest load


def load(block: Any, layout: Any, vector: int) -> Any:
    """The values of a block, a part of a reference; each thread loads `vector` neighbours at once."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import mosaic

    dtype = block.dtype
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(block.shape, dtype, layout=layout)
    )
    def aligned_load(_: Any, memory: Any) -> Any:
        values = mosaic.FragmentedArray.load_strided(memory, vec_size=vector, is_signed=is_signed)
        for register in values.registers.flat:
            register.owner.attributes["alignment"] = _alignment(dtype, vector)
        return values

    return aligned_load(block)  # type: ignore


def store(block: Any, x: Any, layout: Any, vector: int) -> None:
    """Writes the values of a block; each thread stores `vector` neighbours at once."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels import mosaic

    dtype = block.dtype

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout))
    def aligned_store(_: Any, memory: Any, values: Any) -> None:
        for get, _update, place, index in mosaic.FragmentedArray.transfer_strided(memory, vector):
            done = mosaic.vector.StoreOp(get(values.registers), place, index)
            done.attributes["alignment"] = _alignment(dtype, vector)

    aligned_store(block, plgpu.layout_cast(x, layout))  # type: ignore


def _alignment(dtype: Any, vector: int) -> Any:
    from pallas_kernels.mosaic import ir

    n_bytes = min(WIDEST, vector * jnp.dtype(dtype).itemsize)
    return ir.IntegerAttr.get(ir.IntegerType.get_signless(64), n_bytes)
