"""Shardings of optimizer state: masters and moments are sharded like their params.

Masters and moments are trees like the params, so each of their leaves gets the sharding of its param. The path says
which one: the path of a leaf of the state ends with the path of its param
(`.guarded.master_inner[0].mu['dense']['kernel']` with `['dense']['kernel']`); only fields may follow, such as `.codes`
of a quantized moment. All other leaves are small and replicated: counts, the loss scale, amax histories.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from pallas_kernels import moments


def sharding_of(tx: optax.GradientTransformation, params: PyTree, shardings: PyTree) -> PyTree:
    """The shardings of `tx.init(params)`, from those of the params; computes and allocates nothing.

        opt_state = jax.jit(tx.init, out_shardings=jaxmp.sharding_of(tx, params, shardings))(params)

    A leaf of its param's shape gets its param's sharding (ZeRO: each device has the state of its part). The scales of
    8-bit moments are cut as their codes are, so each device has the scales of its codes. A leaf of another shape,
    such as Adafactor's rows and columns, is replicated.

    Args:
      tx: any optax transform.
      params: the params, arrays or `jax.ShapeDtypeStruct`s, as `tx.init` takes them.
      shardings: tree of `NamedSharding`s like the params, or a prefix of it, for `jax.jit` and `jax.device_put`. There
        scales that the number of devices does not divide are whole on each device. Or a tree of `PartitionSpec`s, for
        the specs of `jax.shard_map`, which refuses such scales by their path.

    Returns:
      The tree of `tx.init(params)` with a sharding (or spec) in place of each array.

    Raises:
      TypeError: arguments in the place of others.
      ValueError: shardings that do not match the params, named by path.

    Example:
      >>> import jaxmp, jax.numpy as jnp
      >>> mesh = jax.make_mesh((4,), ("fsdp",))
      >>> tx = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
      >>> params = {"w": jax.ShapeDtypeStruct((8, 2), jnp.float32)}
      >>> state = sharding_of(tx, params, {"w": NamedSharding(mesh, PartitionSpec("fsdp"))})
      >>> optax.tree.get(state, "master_params")["w"].spec == PartitionSpec("fsdp")
      True
      >>> optax.tree.get(state, "loss_scale").spec == PartitionSpec()
      True
    """
    _check_order(tx, params, shardings)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    of_params = by_param(params, shardings)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    owners = {keystr(path): (x.shape, of_params[tree_paths.path_str(path)]) for path, x in leaves}
    mesh = next((s.mesh for s in of_params.values() if isinstance(s, NamedSharding)), None)

    def place(path: Any, x: Any) -> Any:
        name = owner_of(keystr(path), owners)
        shape, sharding = (None, None) if name is None else owners[name]

        def placed(spec: PartitionSpec) -> Any:
            if mesh is None:
                return spec
            kind = {} if sharding is None or sharding.memory_kind is None else {"memory_kind": sharding.memory_kind}
            return NamedSharding(mesh if sharding is None else sharding.mesh, spec, **kind)

        if moments.is_quantized(x):
            scales = PartitionSpec() if shape is None else spec_of_scales(x.scales.shape, sharding)
            return moments.Quantized(placed(PartitionSpec() if shape is None else _spec_of(sharding)), placed(scales))
        return placed(_spec_of(sharding) if x.shape == shape else PartitionSpec())

    with warnings.catch_warnings(action="ignore"):  # of masters from 16 bits: nothing starts here
        state = jax.eval_shape(tx.init, params)
    return jax.tree_util.tree_map_with_path(place, state, is_leaf=moments.is_quantized)


def _check_order(tx: Any, params: PyTree, shardings: PyTree) -> None:
    """Raises a TypeError for arguments of `sharding_of` in the place of others."""
    wrong = [] if hasattr(tx, "init") and hasattr(tx, "update") else [f"{type(tx).__name__} as tx"]
    arrays = jax.tree.leaves(params, is_leaf=is_sharding)
    wrong += [f"{type(x).__name__} in params" for x in arrays if not hasattr(x, "shape")][:1]
    places = jax.tree.leaves(shardings, is_leaf=is_sharding)
    wrong += [f"{type(x).__name__} in shardings" for x in places if not is_sharding(x)][:1]
    if wrong:
        raise TypeError(
            f"sharding_of(tx, params, shardings) takes NamedShardings or PartitionSpecs, as layout.shardings; got "
            f"{', '.join(wrong)}."
        )


def chosen(x: Any) -> Any:
    """The sharding that the user chose for an array or a description; None for what is free to move."""
    return None if isinstance(x, jax.Array) and not x.committed else getattr(x, "sharding", None)


def is_sharding(x: Any) -> bool:
    """Whether `x` is a sharding or a PartitionSpec."""
    return isinstance(x, jax.sharding.Sharding | PartitionSpec)


def owner_of(path: str, params: Iterable[str]) -> str | None:
    """The param that a leaf of an optimizer's state belongs to: the path of the leaf ends with it, fields aside."""
    # Paths as `jax.tree_util.keystr` writes them: so a field `.mu` of a state differs from a param `['mu']`.
    best, owner = (-1, -1), None
    for name in params:
        end = path.rfind(name) + len(name)
        if end >= len(name) and path[end : end + 1] in ("", ".", "[") and (end, len(name)) > best:
            best, owner = (end, len(name)), name
    return owner


def axes_of(spec: Iterable[Any]) -> tuple[str, ...]:
    """The mesh axes that `spec` cuts an array over."""
    cut = (part for part in spec if part is not None and part is not PartitionSpec.UNCONSTRAINED)
    return tuple(name for part in cut for name in (part if isinstance(part, tuple) else (part,)))


def devices_per_dim(spec: Iterable[Any], ndim: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """How many devices each of the `ndim` dimensions of an array is cut over; `sizes` are those of the mesh's axes."""
    cut = [math.prod(sizes[name] for name in axes_of((part,))) for part in spec]
    return (*cut, *[1] * (ndim - len(cut)))


def by_param(params: PyTree, shardings: PyTree) -> dict[str, Any]:
    """The sharding of each param by path, from a tree or a prefix; a ValueError if it does not fit its shape."""
    prefix = [
        (tree_paths.path_str(p), s) for p, s in jax.tree_util.tree_leaves_with_path(shardings, is_leaf=is_sharding)
    ]
    kind = NamedSharding if any(isinstance(s, NamedSharding) for _, s in prefix) else PartitionSpec
    for path, s in prefix:
        if not isinstance(s, kind):
            raise ValueError(
                f"shardings must be all NamedShardings or all PartitionSpecs; got {type(s).__name__} at {path}"
            )
    by_path = dict(prefix)
    shardings_by_path: dict[str, Any] = {}
    for path, x in tree_paths.leaves_by_path(params).items():
        above = [path.rsplit("/", depth)[0] for depth in range(path.count("/") + 1)] + ["<root>"]
        sharding = next((by_path[a] for a in above if a in by_path), None)
        if sharding is None:
            raise ValueError(f"shardings must match the params; got none for {path}, of shape {x.shape}")
        _check_fits(path, x.shape, sharding)
        shardings_by_path[path] = sharding
    unused = [
        path
        for path in by_path
        if path != "<root>" and not any(f"{p}/".startswith(f"{path}/") for p in shardings_by_path)
    ]
    if unused:
        raise ValueError(f"shardings must match the params; {unused[0]} is in shardings only")
    return shardings_by_path


def _check_fits(path: str, shape: tuple[int, ...], sharding: Any) -> None:
    spec = _spec_of(sharding)
    if len(spec) > len(shape):
        raise ValueError(
            f"shardings must match the params; got {spec} for shape {shape} at {path}, which has fewer dimensions"
        )
    if isinstance(sharding, NamedSharding):
        for dim, (length, devices) in enumerate(
            zip(shape, devices_per_dim(spec, len(shape), sharding.mesh.shape), strict=True)
        ):
            if length % devices:
                raise ValueError(
                    f"devices must divide a dimension; got shape {shape} at {path}, cut over {devices} in dimension "
                    f"{dim}. Pad it: jaxmp.fsdp.pad."
                )


def _spec_of(sharding: Any) -> PartitionSpec:
    return sharding if isinstance(sharding, PartitionSpec) else sharding.spec


def spec_of_scales(shape: tuple[int, ...], sharding: Any) -> PartitionSpec:
    """The spec of the scales of 8-bit moments: that of the codes, less the dimensions that a known mesh cannot cut."""
    spec = _spec_of(sharding)
    if isinstance(sharding, PartitionSpec):
        return spec
    devices = devices_per_dim(spec, len(shape), sharding.mesh.shape)
    return PartitionSpec(*(part if n % k == 0 else None for n, part, k in zip(shape, spec, devices, strict=False)))


def is_explicit(x: Array) -> bool:
    """Whether `x` is on a mesh with explicit axes: there, some operations must name the sharding of their result."""
    return jax.sharding.AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types


def whole_if_explicit(x: Array) -> NamedSharding | None:
    """The sharding of an uncut result of `x` where it must be named; else None.

    It holds the mesh: a PartitionSpec alone is an error outside of `jax.set_mesh`.
    """
    return NamedSharding(jax.typeof(x).sharding.mesh, PartitionSpec()) if is_explicit(x) else None
