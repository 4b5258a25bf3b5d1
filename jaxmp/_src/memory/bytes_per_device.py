"""The part of a tree that one device of a mesh has: sizes from `PartitionSpec`s, without placing anything.

If an axis of n elements is split over k devices, each device has ceil(n / k) elements; where k does not divide n, XLA
pads. The optimizer's state has no specs of its own. A moment or a master is split like its param (`shardings.owner_of`)
if it has as many axes. Leaves that belong to no param (counts, the loss scale, the factors of Adafactor) are
replicated.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import per_device, shardings
from jaxmp._src.memory import buffers

AnyMesh = Mesh | AbstractMesh


def specs_of(params: PyTree, specs: PyTree | None, mesh: AnyMesh | None) -> dict[str, PartitionSpec]:
    """The spec of each param by path: from `specs`, else from the param's own sharding, else not split."""
    if mesh is not None and not isinstance(mesh, AnyMesh):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh or AbstractMesh; got {type(mesh).__name__}. Make one with jax.make_mesh."
        )
    leaves = tree_paths.leaves_by_path(params)
    if specs is None:
        found = {path: getattr(x, "sharding", None) for path, x in leaves.items()}
    else:
        is_spec = lambda x: x is None or shardings.is_sharding(x)  # noqa: E731
        given = jax.tree_util.tree_leaves_with_path(specs, is_leaf=is_spec)
        found = {tree_paths.path_str(path): spec for path, spec in given}
        _check_paths(found, leaves)
    return {path: _checked(path, found[path], x, mesh, is_given=specs is not None) for path, x in leaves.items()}


def of_array(x: Any, spec: PartitionSpec, mesh: AnyMesh | None) -> int:
    """The bytes of `x` on one device, with padding."""
    if mesh is None:
        return buffers.nbytes(x)
    devices = shardings.devices_per_dim(spec, len(x.shape), mesh.shape)
    here = tuple(-(-n // k) for n, k in zip(x.shape, devices, strict=True))
    return buffers.nbytes(jax.ShapeDtypeStruct(here, x.dtype))


def own_part(path: Sequence[Any], x: Any) -> Any:
    """`x`, without its axis of devices if each device has its own (`PerDevice`); `path` is of `jax.tree_util`."""
    return x if per_device.axis_of(path) is None else jax.ShapeDtypeStruct(x.shape[1:], x.dtype)


def owners(params: PyTree, splits: Mapping[str, PartitionSpec]) -> dict[str, tuple[Any, PartitionSpec]]:
    """Each param with its spec, by the path that `keystr` writes; `splits` has the specs by path, from `specs_of`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(path): (x, splits[tree_paths.path_str(path)]) for path, x in leaves}


def spec_in_state(
    path: str, x: Any, params: Mapping[str, tuple[Any, PartitionSpec]], mesh: AnyMesh | None
) -> PartitionSpec:
    """The spec of a leaf of the optimizer's state: that of its param if both have as many axes, else not split.

    An axis of another length than the param's, as scales of 8-bit moments have, is whole if the devices do not divide
    it: `sharding_of` cuts it so.
    """
    # `path` is of `jax.tree_util.keystr`, as for `owner_of`; `params` is from `owners`.
    owner = shardings.owner_of(path, params)
    if owner is None or len(params[owner][0].shape) != len(x.shape):
        return PartitionSpec()
    param, spec = params[owner]
    if mesh is None or param.shape == x.shape:
        return spec
    devices = shardings.devices_per_dim(spec, len(x.shape), mesh.shape)
    axes = zip(spec, x.shape, param.shape, devices, strict=False)
    return PartitionSpec(*(part if n == of_param or n % k == 0 else None for part, n, of_param, k in axes))


def split_of_batch(axes: str | Sequence[str] | None, mesh: AnyMesh | None) -> int:
    """The number of devices that the leading axis of a batch is split over."""
    if mesh is None:
        if axes:
            raise ValueError(f"data_axes must be axes of a mesh; got {axes!r} and no mesh. Pass mesh=.")
        return 1
    if axes is None:
        raise ValueError(
            f"with a mesh, data_axes must name the axes of {tuple(mesh.axis_names)} that the batch is split over; got "
            f"data_axes=None. Pass data_axes=({mesh.axis_names[0]!r},), or () if every device has the whole batch."
        )
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    _check_axes("the batch", names, mesh)
    return math.prod(mesh.shape[name] for name in names)


def _check_paths(found: Mapping[str, Any], leaves: Mapping[str, Any]) -> None:
    for where, only in (("specs", found.keys() - leaves.keys()), ("the params", leaves.keys() - found.keys())):
        if only:
            raise ValueError(
                f"specs must have the structure of the params, with a PartitionSpec or None in place of each array; "
                f"{min(only)} is in {where} only."
            )


def _checked(path: str, spec: Any, x: Any, mesh: AnyMesh | None, *, is_given: bool) -> PartitionSpec:
    if spec is None or (not is_given and isinstance(spec, jax.sharding.SingleDeviceSharding)):
        return PartitionSpec()
    if isinstance(spec, NamedSharding):
        spec = spec.spec
    if not isinstance(spec, PartitionSpec):
        raise TypeError(
            f"the spec of a param must be a PartitionSpec or a NamedSharding; got {type(spec).__name__} at {path}"
        )
    if mesh is None:
        if any(entry is not None for entry in spec):
            raise ValueError(f"specs that split params need a mesh; got {spec} at {path} and no mesh. Pass mesh=.")
        return spec
    if len(spec) > len(x.shape):
        raise ValueError(
            f"a spec can have at most one entry for each axis; got {spec} at {path}, which has shape {tuple(x.shape)}."
        )
    _check_axes(path, shardings.axes_of(spec), mesh)
    return spec


def _check_axes(path: str, names: Sequence[str], mesh: AnyMesh) -> None:
    for i, name in enumerate(names):
        if name not in mesh.axis_names:
            raise ValueError(
                f"specs must name axes of the mesh, which are {tuple(mesh.axis_names)}; got {name!r} at {path}."
            )
        if name in names[:i]:
            raise ValueError(f"a spec can name each axis of the mesh once; got {name!r} twice at {path}.")
