"""The memory of a training step as XLA compiles it: nothing is allocated and nothing runs.

A plan from shapes is a model of what XLA decides, and XLA decides anew in each version. This asks XLA itself.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from jax.tree_util import keystr, tree_map_with_path
from jaxtyping import PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.guard import scale_reads
from jaxmp._src.memory import bytes_per_device
from jaxmp._src.step import microbatches, state as states, transform, value_and_grad as gradients
from jaxmp._src.step.policy import Policy


class Compiled(NamedTuple):
    """What XLA says of a compiled step, in bytes on one device.

    Attributes:
      peak: arguments, scratch memory, and results that take no donated argument's place.
      device: the kind of the devices that it was compiled for.
    """

    peak: int
    device: str


class Step(NamedTuple):
    """A training step: `jaxmp.value_and_grad` and `jaxmp.apply_gradients`, jitted, with params and state donated.

    Attributes:
      loss_fn, has_aux, policy, accumulate: as for `jaxmp.value_and_grad`; policy None: the loss runs as it is written.
      optimizer: the transform.
      batch_argnums: the entries of the batch that microbatches cut.
    """

    loss_fn: Callable[..., Any]
    has_aux: bool
    policy: Policy | None
    optimizer: optax.GradientTransformation
    accumulate: int
    batch_argnums: Sequence[int]

    def run(self, params: PyTree, opt_state: Any, batch: tuple[Any, ...]) -> Any:
        differentiated = gradients.value_and_grad(
            self.loss_fn,
            has_aux=self.has_aux,
            policy=self.policy,
            accumulate=self.accumulate,
            accumulate_argnums=[i + 1 for i in self.batch_argnums],
        )
        value, grads = differentiated(params, *batch, opt_state=opt_state)
        if states.has_loss_scale(opt_state):
            scale_reads.note_scaled(grads, opt_state)
        params, opt_state = transform.apply_gradients(self.optimizer, grads, opt_state, params)
        return params, opt_state, value


def compiled(
    step: Step,
    arguments: tuple[PyTree, Any, tuple[Any, ...]],
    splits: Mapping[str, PartitionSpec],
    data_axes: str | Sequence[str] | None,
    mesh: bytes_per_device.AnyMesh | None,
) -> Compiled:
    """Compiles `step`.

    Args:
      step: what is compiled.
      arguments: params, state and batch as arrays or `jax.ShapeDtypeStruct`s, whole.
      splits: the spec of each param by path; the state is split like its params.
      data_axes: axes of the mesh over which the batch is split.
      mesh: the devices; None: the default device.
    """
    params, opt_state, batch = arguments
    owners = bytes_per_device.owners(params, splits)
    places = (
        tree_paths.map_with_path(lambda path, x: _placed(x, splits[path], mesh), params),
        tree_map_with_path(
            lambda path, x: _placed(x, bytes_per_device.spec_in_state(keystr(path), x, owners, mesh), mesh), opt_state
        ),
        tuple(
            jax.tree.map(lambda x, i=i: _placed(x, _spec_of_batch(x, data_axes, i in step.batch_argnums), mesh), part)
            for i, part in enumerate(batch)
        ),
    )
    lowered = jax.jit(lambda *args: step.run(*args), donate_argnums=(0, 1), keep_unused=True).lower(*places)
    found: Any = lowered.compile().memory_analysis()
    own_results = max(found.output_size_in_bytes - found.alias_size_in_bytes, 0)
    device = (jax.devices() if mesh is None else mesh.devices.flat)[0]  # type: ignore[union-attr]
    return Compiled(found.argument_size_in_bytes + found.temp_size_in_bytes + own_results, device.device_kind)


def _placed(x: Any, spec: PartitionSpec, mesh: bytes_per_device.AnyMesh | None) -> jax.ShapeDtypeStruct:
    """`x` as an abstract argument on the devices of `mesh`; None: on the default device."""
    if mesh is None:
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            "compiled=True compiles for the devices of mesh, which must be a jax.sharding.Mesh of devices; got an "
            f"AbstractMesh {mesh}. Make one with jax.make_mesh, or of devices that are only described with "
            "jax.experimental.topologies."
        )
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))


def _spec_of_batch(x: Any, data_axes: str | Sequence[str] | None, is_cut: bool) -> PartitionSpec:
    if not (is_cut and data_axes and x.shape) or microbatches.is_key(x):
        return PartitionSpec()
    return PartitionSpec(data_axes if isinstance(data_axes, str) else tuple(data_axes))
