"""Counts the bytes of a training step from shapes, and prints them.

`plan` evaluates `cast_to_param` and `optimizer.init` on shapes, traces the loss and its gradient, and reads the
activations from that program (`buffers`). `shards` gives the part of each leaf that one device has.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import optax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import PyTree

from jaxmp._src.base import tables, tree_paths
from jaxmp._src.devices import shardings
from jaxmp._src.distributed import fsdp
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.guard import argument_kinds, compute_dtypes
from jaxmp._src.memory import (
    buffers,
    bytes_per_device,
    compiled as compiled_lib,
    measured as measured_lib,
    overview as overview_lib,
)
from jaxmp._src.numerics import casting
from jaxmp._src.programs import jaxprs
from jaxmp._src.step import (
    microbatches,
    state as states,
    value_and_grad as gradients,
)
from jaxmp._src.step.optimizers import as_transformation
from jaxmp._src.step.policy import Policy, get_policy

# XLA's scratch memory beside the plan's: on every step that was compiled for an H100 (benchmarks/results/h100_peaks*).
_LEAST, _MOST = 0.7, 1.45
_OF_GPUS = (
    "(activations, temporaries and peak are a model of XLA for GPUs, and no model of it for CPUs. XLA's peak lay from\n"
    " `at least` to `at most` on all steps compiled for an H100; compiled=True gives XLA's own peak for your device.\n"
    " Not counted: workspaces of cuBLAS and cuDNN, fragmentation, and CUDA's context of about 0.5 GB)"
)
_COMPILED = (
    "(peak of {heading} as XLA compiled the step for {device}; its temporaries are all else at the peak: activations\n"
    " too. Not counted: fragmentation, and the context of a GPU, about 0.5 GB)"
)
_UNITS = ("B", "KB", "MB", "GB", "TB")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device. `print(plan)` shows them as a table.

    Attributes:
      params: params as the policy stores them, with the scales of fp8 layers.
      masters: float32 copies of 16-bit params; with `remainder_bits=`, the remainders.
      optimizer: the rest of the optimizer's state: moments, counts, the loss scale, fp8 histories.
      batch: the arguments of the loss other than the params.
      gradients: gradients of all params; with `accumulate` > 1, the float32 sums and those of one microbatch.
      activations: values that the forward pass stores for the backward pass, gathered params too; None without a loss.
      temporaries: other values (no activations, no gradients) at the moment of the largest use; None without a loss.
      saved: activations as JAX saves them. XLA stores fewer, because it computes the cheap ones again in the kernels
        that read them; a compiler without fusion would store all of them. None without a loss.
      peak: the largest use of the step: gradients are written while activations are freed. Without a loss, all parts
        except activations.
      compiled_for: the kind of device that `compiled=True` compiled the step for. Then `peak` is XLA's own, and
        `temporaries` is the rest of it, beside stored arrays, batch and gradients. None: nothing was compiled.
      num_params: P, the parameters of the whole model, without fp8 scales.
      num_devices: devices of the mesh.

    Example:
      >>> model = {"kernel": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
      >>> tx = optax.adam(1e-3)
      >>> plan(model, "fp32", optimizer=tx).total / 1e6  # 16 bytes a parameter
      16.000004
    """

    params: int
    masters: int
    optimizer: int
    batch: int
    gradients: int
    activations: int | None
    temporaries: int | None
    saved: int | None
    peak: int
    num_params: int
    num_devices: int = 1
    compiled_for: str | None = None

    @property
    def peak_range(self) -> tuple[int, int]:
        """(the least, the most) that the peak may be: XLA's decisions differ from step to step and with its version.

        Stored arrays and the batch are exact. For the rest, XLA for an H100 was within this range on all steps that
        were compiled for the comparison. Both numbers are `peak` if nothing is uncertain: without a loss, and with
        `compiled=True`.
        """
        if self.compiled_for is not None or self.activations is None:
            return self.peak, self.peak
        exact = self.stored + self.batch
        return exact + math.floor(_LEAST * (self.peak - exact)), exact + math.ceil(_MOST * (self.peak - exact))

    @property
    def stored(self) -> int:
        """Bytes between two steps: params, masters and the rest of the optimizer's state."""
        return self.params + self.masters + self.optimizer

    @property
    def total(self) -> int:
        """The sum of all parts: the use of a step that returns all gradients before it frees activations."""
        return self.stored + self.batch + self.gradients + (self.activations or 0) + (self.temporaries or 0)

    def beside_measured(self, device: Any = None) -> str | None:
        """This plan of the step that the process has run beside the measured memory, as a text table.

        Args:
          device: default: the first of `jax.local_devices()`.

        Returns:
          The planned and measured peak and use between steps; None if the device does not measure its memory (CPU).

        Example:
          >>> found = plan({"w": jnp.ones(4)}, "fp32", optimizer=optax.sgd(0.1))
          >>> found.beside_measured(jax.devices("cpu")[0]) is None
          True
        """
        found = measured_lib.measured(device)
        if found is None:
            return None
        between = self.stored + self.batch
        lines = [
            ("", "planned", "measured", "measured / planned"),
            ("peak", _readable(self.peak), _readable(found.peak), f"{found.peak / max(self.peak, 1):.2f}"),
            ("between steps", _readable(between), _readable(found.in_use), f"{found.in_use / max(between, 1):.2f}"),
        ]
        if found.fragmentation is not None:
            lines.append(("fragmentation", "", f"{found.fragmentation:.0%}", ""))
        return tables.columns(lines, "<>>")

    def __str__(self) -> str:
        return table({"bytes on a device": self})


def plan(
    params: PyTree,
    policy: str | jmp.Policy,
    *,
    optimizer: optax.GradientTransformation,
    loss_fn: Callable[..., Any] | None = None,
    batch: tuple[Any, ...] = (),
    has_aux: bool = False,
    accumulate: int = 1,
    batch_argnums: int | Sequence[int] | None = None,
    mesh: bytes_per_device.AnyMesh | None = None,
    specs: PyTree | None = None,
    data_axes: str | Sequence[str] | None = None,
    compiled: bool = False,
) -> Plan:
    """Counts the bytes that a training step uses on one device, from shapes alone.

    Params, state, batch and gradients are exact. Activations and the peak are a model of XLA for GPUs, whose own peak
    lies in `Plan.peak_range`. With `compiled=True` XLA compiles the step, and the peak is exact.

    Args:
      params: the model's float32 params that `optimizer.init` gets: arrays or `jax.ShapeDtypeStruct`s
        (`jax.eval_shape` of the model's `init`).
      policy: as for `jaxmp.mixed_precision`; gives the stored dtypes of the params.
      optimizer: the optimizer of the loop, `jaxmp.mixed_precision(...)` or any other optax transform. Its `init` is
        evaluated on shapes: on the float32 params if it keeps masters, else on the stored params.
      loss_fn: `loss_fn(params, *batch)`, a float scalar, as for `jaxmp.value_and_grad`. A model that is written in 16
        bits, or called under autocast, computes as it does; else, under `mixed_precision`, it runs in the precision of
        `policy`, as `value_and_grad(policy=)` runs it. Under `jax.checkpoint` only the values that it saves count.
        None: no activations are counted.
      batch: the other arguments of `loss_fn`, arrays or `jax.ShapeDtypeStruct`s, for all devices and all microbatches
        together; leading axes are batch axes. Scalars and PRNG keys are not cut.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      accumulate: number of microbatches, as in `jaxmp.value_and_grad`; activations are those of one microbatch.
      batch_argnums: the entries of `batch` whose leading axis is the batch and is cut for devices and microbatches;
        name them if there are others, such as batch_stats. Default: all.
      mesh: devices, real or not (`jax.sharding.AbstractMesh`); None: one device.
      specs: tree of `PartitionSpec`s (`NamedSharding`s, None) like the params. None: the params' own shardings.
        Masters, moments and gradients are split like their params. Params that are split over an axis of `data_axes`
        (FSDP) count as whole, in addition, while the loss uses them: from `jaxmp.fsdp.gather`, or from the start.
      data_axes: axes of `mesh` over which the batch's leading axis is split; `()` for none.
      compiled: whether to compile the step (`jaxmp.value_and_grad`, `jaxmp.apply_gradients`, under `jax.jit`, with
        params and state donated), which takes seconds to minutes, and to take the peak from XLA. It is compiled for the
        devices of `mesh`, real or described (`jax.experimental.topologies`); without a mesh, for the default device.

    Returns:
      A `Plan`.

    Raises:
      TypeError: a policy, optimizer, mesh or batch of the wrong type; params that are not arrays, named by path.
      ValueError: specs that do not match the params or name an axis that the mesh does not have, by path; a batch that
        the data axes or `accumulate` do not divide, by path; a mesh and a batch without `data_axes`; `compiled=True`
        without a loss, on an AbstractMesh, or with a loss that calls `jaxmp.fsdp.gather` (its step is a shard_map).

    Example:
      >>> import jaxmp
      >>> model = {"kernel": jax.ShapeDtypeStruct((512, 512), jnp.float32)}
      >>> def loss_fn(params, x):
      ...     y = jnp.tanh(x.astype(params["kernel"].dtype) @ params["kernel"])
      ...     return jnp.mean((y @ params["kernel"]).astype(jnp.float32) ** 2)
      >>> x = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16)
      >>> tx = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
      >>> found = plan(model, "bf16", optimizer=tx, loss_fn=loss_fn, batch=(x,))
      >>> found.params // found.num_params, found.masters // found.num_params, found.optimizer // found.num_params
      (2, 4, 8)
      >>> found.activations // (64 * 512)  # tanh, and the output: 2 bytes each
      4

    References:
      Micikevicius et al. 2018, "Mixed Precision Training" (arXiv 1710.03740); Rajbhandari et al. 2020, "ZeRO" (arXiv
      1910.02054), section 3, for the 16 bytes; Korthikanti et al. 2022 (arXiv 2205.05198) for a transformer's N.
    """
    argument_kinds.check(
        "memory.plan(params, policy, optimizer=)", params=("params", params), policy=("policy", policy)
    )
    policy, optimizer = get_policy(policy), as_transformation(optimizer)
    k = microbatches.check_accumulate(accumulate)
    shapes = _shapes_of_params(params)
    splits = bytes_per_device.specs_of(params, specs, mesh)
    ways = bytes_per_device.split_of_batch(data_axes, mesh) if jax.tree.leaves(batch) or data_axes else 1
    part, microbatch = (_part(batch, batch_argnums, ways, n) for n in (1, k))
    stored = jax.eval_shape(policy.cast_to_param, shapes)
    opt_state = jax.eval_shape(optimizer.init, shapes)
    if not states.with_masters(opt_state):
        opt_state = jax.eval_shape(optimizer.init, stored)

    def of_params(tree: PyTree) -> int:
        return sum(
            bytes_per_device.of_array(x, splits[path], mesh) for path, x in tree_paths.leaves_by_path(tree).items()
        )

    def of_state(tree: PyTree) -> int:
        leaves = [(keystr(path), bytes_per_device.own_part(path, x)) for path, x in tree_leaves_with_path(tree)]
        return sum(
            bytes_per_device.of_array(x, bytes_per_device.spec_in_state(path, x, owners, mesh), mesh)
            for path, x in leaves
        )

    owners = bytes_per_device.owners(shapes, splits)
    jaxpr, grads, others, taken = None, tree_paths.map_with_path(_gradient_like, stored), 0, None
    gathers = False
    if loss_fn is not None:
        jaxpr, grads, others, taken = _trace(loss_fn, has_aux, policy, stored, opt_state, microbatch)
        cut = {path for path, spec in splits.items() if _is_cut_as_batch(spec, data_axes)}
        gathers = _gathers(jaxpr)
        if cut and not gathers:
            run = _gathering(loss_fn, cut)
            jaxpr, grads, others, _ = _trace(run, has_aux, policy, stored, opt_state, microbatch)
    split_grads = [
        bytes_per_device.of_array(x, splits[path], mesh) for path, x in tree_paths.leaves_by_path(grads).items()
    ]
    used = buffers.usage(jaxpr, output_bytes=[None] * others + split_grads) if jaxpr else None
    sums = of_params(casting.cast_floats(grads, jnp.float32)) if k > 1 else 0
    masters = sum(of_state(found.master_params) for found in states.with_masters(opt_state))
    param_bytes, state_bytes = of_params(stored), of_state(opt_state)
    batch_bytes = sum(map(buffers.nbytes, jax.tree.leaves(part)))
    found = Plan(
        params=param_bytes,
        masters=masters,
        optimizer=state_bytes - masters,
        batch=batch_bytes,
        gradients=sum(split_grads) + sums,
        activations=used and used.kept,
        temporaries=used and max(used.scratch - used.kept, 0),
        saved=used and used.saved,
        peak=param_bytes + state_bytes + batch_bytes + sums + (used.peak if used else sum(split_grads)),
        num_params=sum(math.prod(x.shape) for x in jax.tree.leaves(scale_leaves.partition(shapes)[1])),
        num_devices=1 if mesh is None else mesh.size,
    )
    if not compiled:
        return found
    if loss_fn is None or gathers:
        got = "no loss_fn" if loss_fn is None else "one that calls jaxmp.fsdp.gather, which belongs into a shard_map"
        raise ValueError(
            f"compiled=True compiles the step of a loss_fn under plain jax.jit; got {got}. Compile a step of your own "
            "with jax.jit(step, donate_argnums=...).lower(...).compile().memory_analysis()."
        )
    rows = _batch_places(batch, batch_argnums)
    step = compiled_lib.Step(loss_fn, has_aux, taken, optimizer, k, rows)
    by_xla = compiled_lib.compiled(
        step, (stored, opt_state, _part(batch, batch_argnums, 1, 1)), splits, data_axes, mesh
    )
    return dataclasses.replace(
        found,
        activations=None,
        temporaries=max(by_xla.peak - found.stored - found.batch - found.gradients, 0),
        peak=by_xla.peak,
        compiled_for=by_xla.device,
    )


def table(plans: Mapping[str, Plan]) -> str:
    """Formats plans as a text table: one line per part, one column per plan.

    Args:
      plans: plans by the heading of their column.

    Returns:
      The table. If activations were counted, it has the range of the peak (`Plan.peak_range`), and lines below say that
      they are those of a GPU, and what is not counted.

    Example:
      >>> model = {"kernel": jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}
      >>> print(table({"sgd": plan(model, "fp32", optimizer=optax.sgd(0.1))}))
                              sgd
      params              4.00 MB
      masters             0 B
      optimizer           0 B
      batch               0 B
      gradients           4.00 MB
      total               8.00 MB
      peak                8.00 MB
      P                   1.00 M
      bytes a parameter   8.00
    """
    columns = list(plans.values())
    names = ["params", "masters", "optimizer", "batch", "gradients", "activations", "temporaries", "total", "peak"]
    names = [name for name in names if any(getattr(p, name) is not None for p in columns)]
    rows = [["", *plans], *([name, *(_readable(getattr(p, name)) for p in columns)] for name in names)]
    ranges = [p.peak_range for p in columns]
    if any(least < most for least, most in ranges):
        rows += [[name, *(_readable(x[i]) for x in ranges)] for i, name in enumerate(("  at least", "  at most"))]
    rows.append(["P", *(_readable(p.num_params, ("", " K", " M", " G", " T"), "") for p in columns)])
    each = [(p.stored + p.gradients) * p.num_devices / max(p.num_params, 1) for p in columns]
    rows.append(["bytes a parameter", *(f"{b:.2f}" for b in each)])
    told = [tables.columns(rows, gap=3)]
    told += [] if all(p.activations is None for p in columns) else [_OF_GPUS]
    told += [_COMPILED.format(heading=name, device=p.compiled_for) for name, p in plans.items() if p.compiled_for]
    return "\n".join(told)


def overview(num_params: float) -> dict[str, Plan]:
    """Plans a model of P parameters under each recipe of this library, with Adam, without activations.

    Args:
      num_params: P; rounded so that the params are a matrix of 1024 columns.

    Returns:
      `Plan`s by the name of the recipe.

    Raises:
      ValueError: `num_params` is not positive.

    Example:
      >>> {name: round((p.stored + p.gradients) / p.num_params, 2) for name, p in overview(2**24).items()}
      {'fp32': 16.0, 'fp16': 16.0, 'bf16': 16.0, 'bf16, remainder_bits=16': 14.0, 'bf16, 8-bit': 7.03,
       'bf16, no masters': 12.0, 'fp8': 16.0, 'fp8 weights': 15.0}
    """
    if not num_params > 0:
        raise ValueError(f"overview plans a number of params above 0; got {num_params!r}")
    return {
        name: plan(tree, policy, optimizer=tx) for name, (tree, policy, tx) in overview_lib.recipes(num_params).items()
    }


def _trace(
    loss_fn: Callable[..., Any],
    has_aux: bool,
    policy: Policy,
    params: PyTree,
    opt_state: Any,
    batch: tuple[Any, ...],
) -> tuple[Any, PyTree, int, Policy | None]:
    """The program of the loss and its gradients, and what it has.

    Returns:
      (program, the gradients' shapes, the number of outputs before them, the policy in which the loss runs; None: as it
      is written).
    """

    def traced(policy: Policy | None) -> tuple[Any, Any]:
        def run(params: PyTree, opt_state: Any, *batch: Any) -> Any:
            if states.has_loss_scale(opt_state):
                grad = gradients.value_and_grad(loss_fn, has_aux=has_aux, policy=policy)  # without its guards
                return grad(params, *batch, opt_state=opt_state)
            return jax.value_and_grad(loss_fn, has_aux=has_aux)(params, *batch)

        return jax.make_jaxpr(run, return_shape=True)(params, opt_state, *batch)

    jaxpr, (first, grads) = traced(None)
    found = compute_dtypes.look_into(jaxpr)
    is_low = any(d.itemsize < 4 for d in found.matmuls | found.hidden)
    misses_low = policy.computes_in_16_bits and bool(found.matmuls) and not is_low
    # Not `found.fp8`: kernels that are stored in fp8 are read in every program.
    if misses_low or (policy.recipe is not None and not jaxprs.makes_fp8(jaxpr)):
        jaxpr, (first, grads) = traced(policy)
        return jaxpr, grads, len(jax.tree.leaves(first)), policy
    return jaxpr, grads, len(jax.tree.leaves(first)), None


def _is_cut_as_batch(spec: PartitionSpec, data_axes: str | Sequence[str] | None) -> bool:
    """Whether a param is cut over an axis of the batch: then each device needs the whole of it, for rows of its own."""
    return bool({*shardings.axes_of(spec)} & {*((data_axes,) if isinstance(data_axes, str) else data_axes or ())})


def _gathers(jaxpr: Any) -> bool:
    """Whether a program calls `jaxmp.fsdp.gather`."""
    return any(eqn.params.get("name") == fsdp.GATHERED for eqn in jaxprs.equations(jaxpr))


def _gathering(loss_fn: Callable[..., Any], paths: set[str]) -> Callable[..., Any]:
    """`loss_fn` with the params at `paths` gathered, all at its start."""

    def run(params: PyTree, *batch: Any) -> Any:
        return loss_fn(tree_paths.map_with_path(lambda path, x: _gathered(x) if path in paths else x, params), *batch)

    return run


@jax.custom_vjp
def _gathered(x: Any) -> Any:
    return checkpoint_name(x, fsdp.GATHERED)


_gathered.defvjp(lambda x: (_gathered(x), None), lambda _, g: (checkpoint_name(g, fsdp.PART),))


def _gradient_like(path: str, x: Any) -> Any:
    if scale_leaves.is_scale(path):
        return jax.ShapeDtypeStruct((*x.shape, 3), x.dtype)  # the record of an amax
    return jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) if stored_kernels.is_stored(x) else x


def _shapes_of_params(params: PyTree) -> PyTree:
    if isinstance(params, nnx.Module):
        raise TypeError(
            "memory.plan: params must be a pytree of arrays; got an nnx module, which holds other state too. Split it: "
            "graphdef, params, rest = nnx.split(model, nnx.Param, ...), and pass params and "
            "loss_fn=lambda params, *batch: loss_fn(nnx.merge(graphdef, params, rest, copy=True), *batch)."
        )

    def shape(path: str, x: Any) -> Any:
        if not hasattr(x, "shape") or not hasattr(x, "dtype"):
            raise TypeError(f"params must be arrays or jax.ShapeDtypeStructs; got {type(x).__name__} at {path}")
        return jax.ShapeDtypeStruct(x.shape, x.dtype)

    return tree_paths.map_with_path(shape, params)


def _part(batch: Any, argnums: int | Sequence[int] | None, ways: int, k: int) -> tuple[Any, ...]:
    """The shapes of one device's part of a batch (or of a microbatch): cut over `ways` devices and `k` microbatches."""
    if not isinstance(batch, tuple):
        raise TypeError(
            f"batch must be the tuple of the arguments of loss_fn after the params; got {type(batch).__name__}. Write "
            f"(x,) for a single argument."
        )

    places = _batch_places(batch, argnums)

    def cut(path: str, x: Any) -> Any:
        x = x if isinstance(x, jax.ShapeDtypeStruct) else jax.eval_shape(lambda: x)
        shape = tuple(x.shape)
        if shape and not microbatches.is_key(x) and int(path.split("/")[0]) in places:
            if shape[0] % (ways * k):
                raise ValueError(
                    f"the batch's leading axis must be a multiple of the devices of data_axes, {ways}, times "
                    f"accumulate, {k}; got {shape} at batch/{path}. Name the entries to cut with batch_argnums=."
                )
            shape = (shape[0] // (ways * k), *shape[1:])
        return jax.ShapeDtypeStruct(shape, x.dtype)

    return tree_paths.map_with_path(cut, batch)


def _batch_places(batch: tuple[Any, ...], argnums: int | Sequence[int] | None) -> Sequence[int]:
    """The entries of the batch that are cut."""
    if argnums is None:
        return range(len(batch))
    return microbatches.resolve_argnums(argnums, len(batch), "batch_argnums")


def _readable(n: int | None, units: Sequence[str] = _UNITS, none: str = "-") -> str:
    if n is None:
        return none
    power = min(max(len(str(n)) - 1, 0) // 3, len(units) - 1)
    return f"{n / 1000**power:.2f} {units[power].strip()}".strip() if power else f"{n} {units[0]}".strip()
