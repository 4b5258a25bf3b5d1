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
from jaxmp._src.step.state_paths import StatePath
from jaxmp._src.transforms import compress
from pallas_kernels import moments


def fitted(
    saved: job_leaves.Saved, wanted: Mapping[StatePath, Any], change: padding.Change
) -> tuple[job_leaves.Saved, list[str]]:
    """`saved` with the moments of padded params in the form that `wanted` has, and the paths that were rounded.

    Leaves are arrays, or descriptions of arrays. A moment of another kind stays as it is: the check of all leaves names
    it.
    """
    given, parts = _moments(saved.state)
    state, rounded = dict(saved.state), []
    for path, like in _moments(wanted)[0].items():
        x, shapes = given.get(path), change.of(path)
        if x is None or shapes is None or not _may_become(x, like) or _form(x) == _form(like):
            continue
        signed = not any(word in compress.NOT_NEGATIVE for word in path.words)
        whole, here = shapes

        def convert(x: Any, like: Any = like, whole: Any = whole, here: Any = here, signed: bool = signed) -> Any:
            return _converted(x, like, whole, here, signed=signed)

        is_here = all(isinstance(part, jax.Array) for part in jax.tree.leaves(x))
        new = jax.jit(convert)(x) if is_here else jax.eval_shape(convert, jax.tree.map(_described, x))
        for old in parts[path]:
            del state[old]
        if isinstance(new, moments.Quantized):
            state |= {_part(path, field): part for field, part in new._asdict().items()}
        else:
            state[path] = new
        if isinstance(like, moments.Quantized) and not _keeps_codes(x, like):
            rounded.append(str(path))
    return saved._replace(state=state), rounded


def _moments(leaves: Mapping[StatePath, Any]) -> tuple[dict[StatePath, Any], dict[StatePath, list[StatePath]]]:
    """(the leaves of a state by path, the two parts of a moment in 8 bits as one; {path: the paths of its parts})."""
    found: dict[StatePath, Any] = {}
    parts: dict[StatePath, list[StatePath]] = {}
    for path, x in leaves.items():
        if path.part in [(field,) for field in moments.Quantized._fields]:
            base = StatePath(path.names[: path.ends], path.role, path.begins, path.ends)
            parts.setdefault(base, []).append(path)
        else:
            found[path], parts[path] = x, [path]
    for base, both in parts.items():
        if base not in found:
            by_field = {path.part[0]: leaves[path] for path in both}
            if by_field.keys() == set(moments.Quantized._fields):
                found[base] = moments.Quantized(**by_field)
            else:
                found |= {path: leaves[path] for path in both}
    return found, parts


def _part(path: StatePath, field: str) -> StatePath:
    return StatePath((*path.names, field), path.role, path.begins, path.ends)


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
