"""Converts moments in 8 bits to another number of devices, where their groups of neighbours may differ.

A group has up to 256 neighbours along the last axis. Its size is the largest supported size that divides the axis; if
there is none, the leaf keeps float32 moments. So another padding can change the form of a moment. If groups stay as
large as before or become smaller, the codes and the scales do not change; a conversion to float32 is exact too. Larger
groups, and groups that are made from float32, round each element to the nearest code under the largest value of its new
group.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmp._src.checkpoint import job_leaves, padding
from jaxmp._src.step import leaf_paths
from jaxmp._src.transforms import compress
from pallas_kernels import moments


def fitted(saved: job_leaves.Saved, structure: Any, change: padding.Change) -> tuple[job_leaves.Saved, list[str]]:
    """`saved` with the moments of padded params in the form that `structure` wants, and the paths that were rounded.

    Leaves are arrays, or descriptions of arrays. A moment of another kind stays as it is: the check of all leaves names
    it.
    """
    given, wanted = _moments(saved.state), _moments(leaf_paths.essential_leaves(structure))
    state, rounded = dict(saved.state), []
    for path, like in wanted.items():
        x, shapes = given.get(path), change.of(path)
        if x is None or shapes is None or not _may_become(x, like) or _form(x) == _form(like):
            continue
        signed = not any(part in compress.NOT_NEGATIVE for part in path.split("/"))
        whole, here = shapes

        def convert(x: Any, like: Any = like, whole: Any = whole, here: Any = here, signed: bool = signed) -> Any:
            return _converted(x, like, whole, here, signed=signed)

        is_here = all(isinstance(part, jax.Array) for part in jax.tree.leaves(x))
        new = jax.jit(convert)(x) if is_here else jax.eval_shape(convert, jax.tree.map(_described, x))
        for name in (path, *(f"{path}/{field}" for field in moments.Quantized._fields)):
            state.pop(name, None)
        if isinstance(new, moments.Quantized):
            state |= {f"{path}/{field}": part for field, part in new._asdict().items()}
        else:
            state[path] = new
        if isinstance(like, moments.Quantized) and not _keeps_codes(x, like):
            rounded.append(path)
    return saved._replace(state=state), rounded


def _moments(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The leaves of a state by path; the two parts of a moment in 8 bits as one."""
    codes, scales = (f"/{field}" for field in moments.Quantized._fields)
    found = dict(leaves)
    for path in leaves:
        base = path.removesuffix(codes)
        if base != path and base + scales in leaves:
            found[base] = moments.Quantized(found.pop(path), found.pop(base + scales))
    return found


def _described(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _form(x: Any) -> Any:
    return [(tuple(part.shape), jnp.dtype(part.dtype)) for part in jax.tree.leaves(x)]


def _may_become(x: Any, like: Any) -> bool:
    """Whether the two are forms of one kind of moment: 8 bits of one codec, or float32."""
    forms = [y for y in (x, like) if isinstance(y, moments.Quantized)]
    wide = [y for y in (x, like) if not isinstance(y, moments.Quantized)]
    codecs = {jnp.dtype(y.codes.dtype) for y in forms}
    return len(codecs) == 1 and all(jnp.dtype(y.dtype) == jnp.float32 and y.ndim for y in wide)


def _keeps_codes(x: Any, like: moments.Quantized) -> bool:
    return isinstance(x, moments.Quantized) and x.group % like.group == 0


def _converted(x: Any, like: Any, whole: tuple[int, ...], here: tuple[int, ...], *, signed: bool) -> Any:
    """A moment in the form of `like`: trimmed to the shape `whole`, then padded with zeros to the shape `here`."""
    if isinstance(like, moments.Quantized) and _keeps_codes(x, like):
        scales = jnp.repeat(x.scales, x.group // like.group, axis=-1)
        groups = (*whole[:-1], -(-whole[-1] // like.group))
        return moments.Quantized(_resized(x.codes, whole, here), _resized(scales, groups, like.scales.shape))
    value = _resized(moments.dequantize(x, signed=signed), whole, here)
    return moments.requantize(value, like, jnp.full(here, 2**15, jnp.int32), signed=signed)


def _resized(x: Any, whole: tuple[int, ...], here: tuple[int, ...]) -> Any:
    # A leaf that Orbax read in its new shape is not longer than that.
    x = x[tuple(slice(min(n, m)) for n, m in zip(x.shape, whole, strict=True))]
    return jnp.pad(x, [(0, m - n) for n, m in zip(x.shape, here, strict=True)])
