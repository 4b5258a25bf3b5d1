"""Runs a function of one array over all leaves of a tree, as a multi-tensor kernel."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree

from pallas_kernels import backend as backends, multi_tensor
from pallas_kernels.leaves import Leaf


def checked(tree: PyTree) -> tuple[list[Array], Any]:
    """The leaves of a tree of 16- or 32-bit floats and its structure; a TypeError for leaves of another dtype."""
    for path, x in jax.tree_util.tree_leaves_with_path(tree):
        dtype = getattr(x, "dtype", type(x).__name__)
        if dtype not in (jnp.float16, jnp.bfloat16, jnp.float32):
            raise TypeError(
                f"leaves must be float16, bfloat16 or float32; got {dtype} at "
                f"{jax.tree_util.keystr(path) or 'the root'}. Cast them first."
            )
    leaves, treedef = jax.tree.flatten(tree)
    return [jnp.asarray(x) for x in leaves], treedef


def over_tree(
    f: Any, leaves: list[Array], scalar: Any, outs: tuple[Any, ...], n_sums: int, name: str, backend: str
) -> tuple[list[tuple[Array, ...]], tuple[Array, ...]]:
    """`f` over all leaves; an empty leaf is only cast."""
    scalar = jnp.asarray(scalar, jnp.float32)
    if scalar.shape:
        raise ValueError(f"{name} takes one scale, float32[], for the whole tree; got shape {scalar.shape}")
    filled = [x for x in leaves if x.size]
    if not filled:
        backends.check(backend)
        return [tuple(x.astype(d) for d in outs) for x in leaves], (jnp.zeros((), jnp.float32),) * n_sums

    def of(arrays: list[Array]) -> list[Leaf]:
        return [Leaf(reads=(x,), outs=outs) for x in arrays]

    def kernel(arrays: list[Array], scalar: Array, interpret: Any) -> Any:
        levels = multi_tensor.UPDATE_LEVELS if outs else multi_tensor.READ_LEVELS
        return multi_tensor.apply(f, of(arrays), [scalar], name=name, n_sums=n_sums, levels=levels, interpret=interpret)

    def plain(arrays: list[Array], scalar: Array) -> Any:
        return multi_tensor.reference(f, of(arrays), [scalar], n_sums=n_sums)

    unmet = None
    if len({backends.varying_axes(x) for x in filled}) > 1:  # the branches of the kernel must have one type
        unmet = "leaves differ in the axes that they vary over in jax.shard_map (pass check_vma=False)"
    result = backends.run(backend, kernel, plain, filled, scalar, unmet=unmet, alone=True)
    results = iter(result.leaves)
    return [next(results) if x.size else tuple(x.astype(d) for d in outs) for x in leaves], result.sums
