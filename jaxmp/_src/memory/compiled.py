"""The largest use of memory of a step on one device, as XLA compiles it; nothing is allocated and nothing runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from flax import nnx

from jaxmp._src.programs import array_functions


def compiled(step: Callable[..., Any], *args: Any, donate_argnums: int | Sequence[int] = ()) -> int:
    """The bytes of the largest use of memory of a step on one device, as XLA plans it.

        peak = arguments + scratch memory + results - results in the place of donated arguments

    XLA compiles the step, which takes seconds to minutes. The number is that of its memory analysis: activations,
    gradients and temporaries are the scratch memory. Arguments that the step does not read, the fragmentation of the
    free memory, and the context of a GPU (about 0.5 GB) are not counted.

    Args:
      step: the whole training step, of `jax.jit`, `nnx.jit`, `jax.pmap`, or not jitted.
      *args: its arguments, arrays, `jax.ShapeDtypeStruct`s or nnx modules. For a mesh, with their shardings; it is
        compiled for the devices of the mesh, real or described (`jax.experimental.topologies`; an `AbstractMesh` has
        none), else for the default device.
      donate_argnums: as for `jax.jit`, of a step that is not jitted. A jitted step says itself what it donates.

    Returns:
      A number of bytes.

    Raises:
      ValueError: `donate_argnums` of a jitted step.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
      >>> compiled(lambda x: x + 1, x), compiled(lambda x: x + 1, x, donate_argnums=0)
      (8000000, 4000000)
    """
    if not hasattr(step, "lower"):  # jax.jit loses what a step changes in nnx modules, and XLA leaves it out
        has_modules = any(map(array_functions.is_module, jax.tree.leaves(args, is_leaf=array_functions.is_module)))
        step = (nnx.jit if has_modules else jax.jit)(step, donate_argnums=donate_argnums)
    elif donate_argnums != ():
        raise ValueError(
            f"memory.compiled: a jitted step says itself what it donates; got donate_argnums={donate_argnums}. Pass "
            f"it to jax.jit."
        )
    memory: Any = step.lower(*args).compile().memory_analysis()  # type: ignore[attr-defined]
    own_results = max(memory.output_size_in_bytes - memory.alias_size_in_bytes, 0)
    return memory.argument_size_in_bytes + memory.temp_size_in_bytes + own_results
