"""Counts the bytes of params, masters, optimizer state and gradients on one device, from shapes alone."""

import dataclasses
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxmp._src.base import tables, tree_paths
from jaxmp._src.devices import shardings
from jaxmp._src.fp8 import amax_records, scale_leaves
from jaxmp._src.step import state as states
from jaxmp._src.step.optimizers import as_transformation
from jaxmp._src.step.policy import get_policy

_UNITS = ("B", "KB", "MB", "GB", "TB", "PB")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device. `print(plan)` shows them as a table, beside the same model in float32.

    Attributes:
      params: params as the policy stores them, with the scales of fp8 layers.
      masters: float32 copies of 16-bit params; with `remainder_bits=`, the remainders.
      optimizer: the rest of the optimizer's state: moments, counts, the loss scale, fp8 histories.
      gradients: gradients of all params. (`accumulate=` of `value_and_grad` adds float32 sums, 4 bytes a param.)
      num_params: P, the params of the whole model, without fp8 scales.
      activation: bytes of each of the N values that a model in the policy's dtype keeps for the backward pass.
      float32: the plan of the same params and the same optimizer in float32, without masters; None in that plan.

    Example:
      >>> model = {"kernel": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
      >>> print(plan(model, "fp16", optimizer=optax.adam(1e-3)))
                       planned    float32
      params           2.00 MB    4.00 MB
      masters              0 B        0 B
      optimizer        4.00 MB    8.00 MB
      gradients        2.00 MB    4.00 MB
      total            8.00 MB   16.00 MB
      a parameter       8.00 B    16.00 B
      an activation        2 B        4 B
    """

    params: int
    masters: int
    optimizer: int
    gradients: int
    num_params: int
    activation: int
    float32: "Plan | None" = None

    @property
    def total(self) -> int:
        """Bytes of all parts. Activations are not among them: their number N is XLA's choice; see `compiled`."""
        return self.params + self.masters + self.optimizer + self.gradients

    def __str__(self) -> str:
        columns = {"planned": self} if self.float32 is None else {"planned": self, "float32": self.float32}
        names = ("params", "masters", "optimizer", "gradients", "total")
        rows = [["", *columns], *([name, *(_readable(getattr(p, name)) for p in columns.values())] for name in names)]
        rows.append(["a parameter", *(f"{p.total / max(p.num_params, 1):.2f} B" for p in columns.values())])
        rows.append(["an activation", *(f"{p.activation} B" for p in columns.values())])
        return tables.columns(rows, "<>>", gap=3)


def plan(
    params: PyTree, policy: str | jmp.Policy, *, optimizer: optax.GradientTransformation, places: PyTree | None = None
) -> Plan:
    """Counts the bytes of params, masters, optimizer state and gradients on one device; nothing is allocated.

    Params are counted as `policy.cast_to_param` stores them, masters and moments as `optimizer.init` makes them, and
    gradients as `jaxmp.value_and_grad` returns them, with one of the params' shape for each param. With P params,
    N activations and Adam:

        float32             params 4P              gradients 4P   moments 8P   activations 4N      16P + 4N
        16-bit, masters     params 2P, masters 4P  gradients 2P   moments 8P   activations 2N      16P + 2N

    Args:
      params: the model's float32 params that `optimizer.init` gets: arrays or `jax.ShapeDtypeStruct`s
        (`jax.eval_shape` of the model's `init`).
      policy: as for `jaxmp.mixed_precision`.
      optimizer: the optimizer of the loop, `jaxmp.mixed_precision(...)` or any other optax transform. Its `init` is
        evaluated on the float32 params if it keeps masters, else on the params as they are stored.
      places: `NamedSharding`s of the params, or a prefix of their tree, on real devices or an
        `jax.sharding.AbstractMesh`. State and gradients are cut like their params, as `jaxmp.sharding_of` says.
        None: the params' own `NamedSharding`s; params without any are whole on one device.

    Returns:
      A `Plan`.

    Raises:
      TypeError: a policy or optimizer of the wrong type; an nnx module; params that are not arrays, or places that are
        not `NamedSharding`s, by path.
      ValueError: an unknown policy; places that do not match the params, or do not divide them, by path.

    Example:
      >>> import jaxmp
      >>> model = {"kernel": jax.ShapeDtypeStruct((1024, 1024), jnp.float32)}
      >>> tx = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
      >>> found = plan(model, "bf16", optimizer=tx)
      >>> [getattr(found, part) // found.num_params for part in ("params", "masters", "optimizer", "gradients")]
      [2, 4, 8, 2]
      >>> mesh = jax.sharding.AbstractMesh((8,), ("fsdp",))
      >>> round(plan(model, "bf16", optimizer=tx, places=NamedSharding(mesh, PartitionSpec("fsdp"))).total / 2**20)
      2

    References:
      Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740); Rajbhandari et al. 2020, "ZeRO" (arXiv
      1910.02054), section 3, for the 16 bytes.
    """
    policy, optimizer = get_policy(policy), as_transformation(optimizer)
    shapes = _shapes(params)
    own = [x.sharding for x in jax.tree.leaves(params) if isinstance(getattr(x, "sharding", None), NamedSharding)]
    if places is None and own:
        whole = NamedSharding(own[0].mesh, PartitionSpec())
        places = jax.tree.map(lambda x: place if (place := getattr(x, "sharding", None)) in own else whole, params)
    for path, place in jax.tree_util.tree_leaves_with_path(places, is_leaf=shardings.is_sharding):
        if not isinstance(place, NamedSharding):
            raise TypeError(
                f"memory.plan: places must be NamedShardings, as jax.sharding.NamedSharding(mesh, spec); got "
                f"{type(place).__name__} at {tree_paths.path_str(path)}"
            )
    stored = jax.eval_shape(policy.cast_to_param, shapes)
    weights = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.float32), scale_leaves.partition(shapes)[1])
    of_param = None if places is None else shardings.by_param(shapes, places)

    def on_device(tree: PyTree) -> int:
        """Bytes of a tree like the params, or of some of them."""
        leaves = tree_paths.leaves_by_path(tree)
        return sum(_bytes(x, None if of_param is None else of_param[path]) for path, x in leaves.items())

    def state_from(params: PyTree) -> tuple[int, int, bool]:
        """(bytes of the masters, bytes of the rest, whether there are masters) of the state of these params."""
        with warnings.catch_warnings(action="ignore"):  # of masters from 16 bits: nothing starts here
            state = jax.eval_shape(optimizer.init, params)
        place = None if places is None else shardings.sharding_of(optimizer, params, places)
        sizes = jax.tree.map(_bytes, state, *([] if place is None else [place]))
        keepers = states.with_masters(sizes)
        masters = sum(jax.tree.leaves([keeper.master_params for keeper in keepers]))
        return masters, sum(jax.tree.leaves(sizes)) - masters, bool(keepers)

    masters, rest, keeps = state_from(shapes)
    num_params = sum(math.prod(x.shape) for x in jax.tree.leaves(weights))
    in_float32 = Plan(on_device(weights), 0, rest, on_device(weights), num_params, activation=4)
    if not keeps:
        masters, rest, _ = state_from(stored)

    def gradient(path: str, x: Any) -> Any:
        if scale_leaves.is_scale(path):
            return jax.ShapeDtypeStruct((*x.shape, amax_records.SIZE), x.dtype)
        return x if policy.reduce_dtype is None else jax.ShapeDtypeStruct(x.shape, policy.reduce_dtype)

    gradients = on_device(tree_paths.map_with_path(gradient, stored))
    activation = jnp.dtype(policy.compute_dtype).itemsize
    return Plan(on_device(stored), masters, rest, gradients, num_params, activation, in_float32)


def _shapes(params: PyTree) -> PyTree:
    if isinstance(params, nnx.Module):
        raise TypeError("memory.plan: params must be arrays; got an nnx module. Pass nnx.state(model, nnx.Param).")

    def shape(path: str, x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"params must be arrays or jax.ShapeDtypeStructs; got {type(x).__name__} at {path}")
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return tree_paths.map_with_path(shape, params)


def _bytes(x: Any, place: NamedSharding | None = None) -> int:
    """The bytes of an array on one device; none in host memory."""
    if place is not None and place.memory_kind == "pinned_host":
        return 0
    return math.prod(x.shape if place is None else place.shard_shape(x.shape)) * x.dtype.itemsize


def _readable(n: int) -> str:
    power = min(max(len(str(n)) - 1, 0) // 3, len(_UNITS) - 1)
    return f"{n / 1000**power:.2f} {_UNITS[power]}" if power else f"{n} B"
