"""The load of a block of a leaf, as wide as the block is aligned.

The compiler chooses the width of a load by the alignment that it can prove. For one leaf it proves 16 bytes. For
several leaves it merges the loads of all branches of the switch into one load from a pointer that the branch chose. It
knows nothing about that pointer, and loads element by element. Here each load carries its alignment, and a merged load
keeps it. Stores do not need this: the compiler merges them later, after it has chosen their widths.

Blocks begin at multiples of their size, and buffers of XLA at multiples of 16 bytes, so the elements that a thread
takes at once are aligned to their own bytes. The interpreter of Pallas does not know this operation.
"""

from typing import Any

import jax.numpy as jnp

WIDEST = 16  # bytes of the widest load


def load(block: Any, layout: Any, vector: int) -> Any:
    """The values of a block, a part of a reference; each thread loads `vector` neighbours at once."""
    from jax.experimental.mosaic.gpu import FragmentedArray
    from jax.experimental.pallas import mosaic_gpu as plgpu
    from jaxlib.mlir import ir

    dtype = block.dtype
    is_signed = jnp.issubdtype(dtype, jnp.signedinteger) if jnp.issubdtype(dtype, jnp.integer) else None

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct(block.shape, dtype, layout=layout)
    )
    def aligned_load(_: Any, memory: Any) -> Any:
        n_bytes = min(WIDEST, vector * jnp.dtype(dtype).itemsize)
        alignment = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), n_bytes)
        values = FragmentedArray.load_strided(memory, vec_size=vector, is_signed=is_signed)
        for register in values.registers.flat:
            register.owner.attributes["alignment"] = alignment
        return values

    return aligned_load(block)  # type: ignore
