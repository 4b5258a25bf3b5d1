"""How params are cut over an axis of a mesh: one dimension of every large leaf, with padding if necessary.

A `Layout` is made once, before training, from shapes alone. It gives the specs for `jax.shard_map`, the shardings for
`jax.jit`, and the leaves that every device has as a whole.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import keystr
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import shardings as shardings_lib
from jaxmp._src.fp8 import scale_leaves

_HOW_TO_MAKE_ONE = "Make one for this tree: jaxmp.fsdp.layout_of(params, mesh)."


@dataclasses.dataclass(frozen=True)
class Cut:
    """How one leaf is cut: along `dim`, padded to a multiple of the number of devices; or not at all.

    Attributes:
      spec: the spec of the leaf on the mesh, also for other axes.
      shape: shape of the whole leaf, without padding.
      dim: the dimension that is cut; None: the leaf is whole on every device of the axis.
      padded: length of that dimension with padding.

    Example:
      >>> Cut(PartitionSpec("fsdp"), shape=(6, 3), dim=0, padded=8).padded
      8
    """

    spec: PartitionSpec
    shape: tuple[int, ...]
    dim: int | None = None
    padded: int = 0

    @property
    def size(self) -> int:
        """The length of the dimension that is cut, without padding."""
        return 0 if self.dim is None else self.shape[self.dim]

    @property
    def padding(self) -> int:
        """How many elements of the whole padded leaf are padding."""
        return 0 if self.dim is None else (self.padded - self.size) * math.prod(self.shape) // self.size


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a tree of params is cut over one axis of a mesh; `layout_of` makes it.

    Attributes:
      mesh: the mesh.
      axis_name: the axis that leaves are cut over.
      cuts: the tree of the params, a `Cut` for each leaf.

    Example:
      >>> layout = layout_of({"w": jnp.ones((8, 3)), "b": jnp.ones(3)}, jax.make_mesh((4,), ("fsdp",)), min_size=8)
      >>> tuple(layout.specs["w"]), tuple(layout.specs["b"]), layout.whole
      (('fsdp', None), (), {'b': True, 'w': False})
    """

    mesh: Any
    axis_name: str
    cuts: PyTree

    @property
    def specs(self) -> PyTree:
        """The tree of `PartitionSpec`s: `in_specs` and `out_specs` of `jax.shard_map`."""
        return jax.tree.map(lambda cut: cut.spec, self.cuts)

    @property
    def shardings(self) -> PyTree:
        """The tree of `NamedSharding`s, for `jax.device_put` and `jax.jit`."""
        return jax.tree.map(lambda cut: NamedSharding(self.mesh, cut.spec), self.cuts)

    @property
    def whole(self) -> PyTree:
        """The tree of bools: True for leaves that every device of the axis has as a whole. For `replicated=`."""
        return jax.tree.map(lambda cut: cut.dim is None, self.cuts)

    @property
    def padding(self) -> int:
        """How many elements of the padded params are padding. For `padding=` of `jaxmp.count_zeros`."""
        return sum(cut.padding for cut in jax.tree.leaves(self.cuts))


def layout_of(
    params: PyTree, mesh: Any, axis_name: str = "fsdp", *, specs: PyTree | None = None, min_size: int = 2**14
) -> Layout:
    """Chooses for every param the dimension that is cut over a mesh axis.

    It takes the longest dimension that the number of devices divides. If there is none, it takes the longest dimension,
    to be padded with zeros up to the next multiple (`pad`). Small leaves and fp8 scales stay whole.

    Args:
      params: the params, arrays or `jax.ShapeDtypeStruct`s.
      mesh: a mesh with the axis `axis_name`.
      axis_name: the axis to cut over.
      specs: tree of `PartitionSpec`s over *other* axes of the mesh (tensor parallelism), or a prefix of it. `layout_of`
        does not cut a dimension that these specs cut.
      min_size: leaves with fewer elements stay whole, such as norms and biases: the time to gather them costs more than
        the memory saves.

    Returns:
      A `Layout`.

    Raises:
      ValueError: no such axis in the mesh; `specs` that do not fit the params, or name `axis_name`, by path.

    Example:
      >>> mesh = jax.make_mesh((4,), ("fsdp",))
      >>> layout_of({"w": jax.ShapeDtypeStruct((50257, 3), jnp.float32)}, mesh).cuts["w"].padded
      50260
    """
    if not isinstance(getattr(mesh, "shape", None), Mapping):
        raise TypeError(f"layout_of(params, mesh) takes a mesh, as of jax.make_mesh; got {type(mesh).__name__}.")
    _check_axis(mesh, axis_name)
    devices = mesh.shape[axis_name]
    whole = PartitionSpec() if specs is None else specs
    try:
        whole_specs = jax.tree.broadcast(whole, params, is_leaf=lambda x: isinstance(x, PartitionSpec))
    except ValueError as e:
        raise ValueError(f"specs must be a tree of PartitionSpecs like the params, or a prefix: {e}") from e

    def cut(path: str, x: Any, spec: Any) -> Cut:
        shape = tuple(x.shape)
        for name in shardings_lib.axes_of(spec):
            _check_axis(mesh, name, f" (in specs at {path})")
        if axis_name in shardings_lib.axes_of(spec) or len(spec) > len(shape):
            raise ValueError(
                f"specs must fit the leaf; got {spec} for shape {shape} at {path}. Leave out {axis_name!r}, which "
                f"layout_of places."
            )
        taken = tuple(spec) + (None,) * (len(shape) - len(spec))
        free = [i for i, name in enumerate(taken) if name is None]
        if scale_leaves.is_scale(path) or not free or x.size < min_size:
            return Cut(PartitionSpec(*spec), shape)
        even = [i for i in free if shape[i] % devices == 0]
        dim = max(even or free, key=lambda i: shape[i])
        padded = -(-shape[dim] // devices) * devices
        return Cut(PartitionSpec(*taken[:dim], axis_name, *taken[dim + 1 :]), shape, dim, padded)

    return Layout(mesh, axis_name, tree_paths.map_with_path(cut, params, whole_specs))


def pad(tree: PyTree, layout: Layout) -> PyTree:
    """Appends zeros to the leaves that the layout pads. Pad the params once, before `tx.init`.

    Elements that are zero and have zero gradients stay zero under every elementwise optax optimizer.
    (`jaxmp.count_zeros` must not count them: see `Layout.padding`.)

    Args:
      tree: unpadded params (or gradients, or masters); or a tree that contains such trees: an optimizer's state, a
        TrainState, `(params, opt_state)`. In such a tree, leaves that belong to a param are found by path, and other
        leaves do not change.
      layout: the layout of these params.

    Returns:
      The padded tree.

    Raises:
      ValueError: a leaf with a length that does not fit the layout, by path; moments in 8 bits, which cannot be padded.

    Example:
      >>> layout = layout_of({"w": jnp.ones((3, 3))}, jax.make_mesh((4,), ("fsdp",)), min_size=1)
      >>> pad({"w": jnp.ones((3, 3))}, layout)["w"].shape
      (4, 3)
    """

    def extend(path: str, x: Any, cut: Cut) -> Any:
        check_length(path, x, cut, cut.size, "an unpadded")
        return padded(x, cut)

    return _map_inside(extend, tree, layout)


def trim(tree: PyTree, layout: Layout) -> PyTree:
    """Removes the padding of `pad`, for export, for checkpoints and for evaluation under plain jit.

    To continue with another number of devices, trim params and state with the old layout and pad them with the new one.

    Args:
      tree: as for `pad`, padded.
      layout: the layout that it was padded with.

    Returns:
      The tree without padding.

    Raises:
      ValueError: a leaf with a length that does not fit the layout, by path.

    Example:
      >>> layout = layout_of({"w": jnp.ones((3, 3))}, jax.make_mesh((4,), ("fsdp",)), min_size=1)
      >>> trim(pad({"w": jnp.ones((3, 3))}, layout), layout)["w"].shape
      (3, 3)
    """

    def cut_off(path: str, x: Any, cut: Cut) -> Any:
        check_length(path, x, cut, cut.padded, "a padded")
        is_tracer = isinstance(x, Tracer)
        if is_tracer:
            sharding: Any = jax.typeof(x).sharding if shardings_lib.is_explicit(x) else None
        else:
            sharding = getattr(x, "sharding", None)
        if cut.dim is None or cut.padded == cut.size or not isinstance(sharding, NamedSharding):
            return trimmed(x, cut)
        # Gathered along the dimension that is cut: the length without padding does not divide.
        spec = tuple(sharding.spec) + (None,) * (x.ndim - len(sharding.spec))
        spec = PartitionSpec(*spec[: cut.dim], None, *spec[cut.dim + 1 :])
        place = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        if isinstance(x, jax.ShapeDtypeStruct):
            return trimmed(jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), cut)
        return trimmed(jax.sharding.reshard(x, place) if is_tracer else jax.device_put(x, place), cut)

    return _map_inside(cut_off, tree, layout)


def _map_inside(f: Callable[[str, Any, Cut], Any], tree: PyTree, layout: Layout) -> PyTree:
    """`map_leaves` on a tree like the params; in any other tree, `f` on the leaves that belong to a cut param."""
    check_is_layout(layout, "the call (tree, layout)")
    cuts = {keystr(path): cut for path, cut in jax.tree_util.tree_leaves_with_path(layout.cuts)}
    if all(keystr(path) in cuts for path, _ in jax.tree_util.tree_leaves_with_path(tree)):
        return map_leaves(f, tree, layout)
    holds_params = False

    def visit(path: Any, x: Any) -> Any:
        nonlocal holds_params
        owner = shardings_lib.owner_of(keystr(path), cuts)
        cut = None if owner is None else cuts[owner]
        if cut is not None and cut.dim is not None and jnp.ndim(x) == len(cut.shape) + 1:
            # It holds several of a param: those of each device, or of the last steps.
            shape = (jnp.shape(x)[0], *cut.shape)
            cut = Cut(PartitionSpec(None, *cut.spec), shape, cut.dim + 1, cut.padded)
        if cut is None or cut.dim is None or jnp.ndim(x) != len(cut.shape):
            holds_params |= cut is not None
            return x
        holds_params = True
        in_8_bits = keystr(path).endswith((".codes", ".scales"))  # moments.Quantized
        if in_8_bits and not cut.padding:
            return x
        if in_8_bits:
            raise ValueError(
                f"moments in 8 bits cannot be padded; got them at {tree_paths.path_str(path)}. Choose min_size= to pad "
                f"no leaf."
            )
        return f(tree_paths.path_str(path), x, cut)

    mapped = jax.tree_util.tree_map_with_path(visit, tree)
    if not holds_params:
        tree_paths.check_same_structure(tree, layout.cuts, "the tree", "the layout", _HOW_TO_MAKE_ONE)
    return mapped


def padded(x: Any, cut: Cut) -> Any:
    """One leaf with zeros appended up to its padded length."""
    if cut.padded == cut.size:
        return x
    return jnp.pad(x, [(0, cut.padded - cut.size) if i == cut.dim else (0, 0) for i in range(x.ndim)])


def trimmed(x: Any, cut: Cut) -> Any:
    """One leaf without its padding."""
    if cut.dim is None or cut.padded == cut.size:
        return x
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(cut.shape, x.dtype, sharding=x.sharding)
    return lax.slice_in_dim(x, 0, cut.size, axis=cut.dim)


def map_leaves(f: Callable[[str, Any, Cut], Any], tree: PyTree, layout: Layout) -> PyTree:
    """`f(path, leaf, cut)` for each leaf of a tree like the layout's params."""
    tree_paths.check_same_structure(tree, layout.cuts, "the tree", "the layout", _HOW_TO_MAKE_ONE)
    return tree_paths.map_with_path(f, tree, layout.cuts)


def check_is_layout(layout: Any, call: str) -> None:
    """Raises a TypeError unless `layout` is one; `call` is where it stands."""
    if not isinstance(layout, Layout):
        raise TypeError(f"{call} takes the layout of jaxmp.fsdp.layout_of(params, mesh); got {type(layout).__name__}.")


def check_length(path: str, x: Any, cut: Cut, expected: int, what: str) -> None:
    """Raises a ValueError unless `x` has the rank of the leaf and, if the leaf is cut, the expected length."""
    got = jnp.shape(x)
    if len(got) != len(cut.shape) or (cut.dim is not None and got[cut.dim] != expected):
        of = f"{len(cut.shape)} dimensions" if cut.dim is None else f"length {expected} in dimension {cut.dim}"
        raise ValueError(
            f"{what} leaf must have {of}; got shape {got} at {path}. Call jaxmp.fsdp.pad(params, layout) before "
            f"tx.init."
        )


def _check_axis(mesh: Any, name: str, where: str = "") -> None:
    if name not in mesh.shape:
        raise ValueError(
            f"layout axes must be in the mesh; got {name!r}{where}, and the mesh has "
            f"{', '.join(map(repr, mesh.shape))}."
        )
