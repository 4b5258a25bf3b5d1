"""Gradients of a scaled loss in the precision of a policy, and their accumulation over microbatches.

`value_and_grad` is `jax.value_and_grad` with four differences:

1.  It multiplies the loss by the scale in float32, inside the differentiated function. It returns the loss before this
    multiplication, never a loss that was scaled and divided again.
2.  The gradients are this device's own. Under `shard_map(check_vma=True)` autodiff would sum them over the mesh in
    float16, so the params are first cast to *varying* over the bound axes. Reduce the gradients yourself
    (`jax.lax.pmean`, or `jaxmp.reduce_gradients` in the chain). Where the loss has a `pmean` of its own, so that all
    devices have one, they are summed in float32: a later mean changes nothing.
3.  With `accumulate=k` the batch is cut into k microbatches. `lax.scan` runs over them, and their gradients are summed
    in float32: L = (1/k) sum_i L_i, each L_i scaled by S/k before differentiation, as in Megatron-LM. All k
    microbatches have one scale and one decision.
4. With `policy=`, the loss runs under the policy, forward and backward (`policy_regions`). With its
    `reduce_dtype="float32"` the gradients of weights are products and sums in float32, and 16-bit params are widened
    before they are differentiated: no rounding to 16 bits comes before the reduction over devices.

The gradients stay scaled. `unscale_and_skip` must unscale them with the scale that scaled them, so it reads the
`opt_state` that is passed here.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, PyTree

from jaxmp._src.autocast import regions, rewrite
from jaxmp._src.base import ambient, compat, signatures, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import collectives, host_memory
from jaxmp._src.distributed import gathered_params
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.fp8.gradients import Check, Fp8Gradients, warn_of_unmoved_scales
from jaxmp._src.numerics import casting
from jaxmp._src.programs import compiled
from jaxmp._src.step import (
    argument_kinds,
    carried_arguments,
    compute_dtypes,
    policy_regions,
    scale_reads,
    state as states,
)
from jaxmp._src.step.microbatches import check_accumulate, resolve_argnums, split_arguments
from jaxmp._src.step.policy import Policy, first_difference, get_policy


def value_and_grad(
    fun: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    *,
    policy: str | jmp.Policy | None = None,
    accumulate: int = 1,
    accumulate_argnums: int | Sequence[int] | None = None,
    carry_argnum: int | None = None,
    axis_name: collectives.AxisName = "auto",
) -> Callable[..., Any]:
    """A function that returns the loss and its *scaled* gradients; use it in place of `jax.value_and_grad`.

    With a policy, the loss runs in its precision: under `jaxmp.autocast` with its compute dtype, with linen's layers in
    fp8 where it says fp8, and with its matmul precision ("fp32", "tf32"). Modules keep a 16-bit `dtype=` of their own;
    `dtype=float32` is ignored. A layer whose params all fit `keep_fp32` of the policy computes in float32. A
    `with jaxmp.autocast(...)` inside the loss counts before the policy. Without a policy nothing is cast.

    Args:
      fun: returns a scalar loss, or `(loss, aux)` with `has_aux`. Return the loss in float32.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns `(loss, aux)`.
      policy: the policy of the optimizer, or its name; see `get_policy`. The `opt_state` of a `jaxmp.linen.TrainState`
        that was created with a policy brings it along, wherever `state.opt_state` is read (after the state has passed a
        `jax.jit`; an `opt_state` that passes alone is a plain one). Then leave it out, or pass the same.
      accumulate: k, the number of microbatches, >= 1.
      accumulate_argnums: which positional arguments hold the batch; not needed if there is one argument beside those of
        `argnums` and `carry_argnum`. Their arrays are cut along the leading axis, which k must divide; PRNG keys are
        split into k (a key that the loss closes over is the same in all microbatches); scalars are repeated. All other
        arguments are passed on whole, as class weights must be.
      carry_argnum: which positional argument is passed through the microbatches, such as BatchNorm's statistics: the
        loss returns its new value as aux, or as the first of two parts of aux. The next microbatch gets that value,
        and aux holds the last one, without an axis of microbatches.
      axis_name: manual axes over which the gradients stay this device's own: `"auto"` for all bound axes, or names.
        (Leave out a tensor-parallel axis over which autodiff should sum.) Where jax tracks that the loss is the same on
        all devices of an axis, as after a `pmean` in it, its gradients are summed over this axis in float32.

    Returns:
      A function of `(*args, opt_state, **kwargs)`, where `opt_state` is the state of `mixed_precision` or of
      `shared_loss_scale`, or a TrainState, giving `(loss, grads)` or `((loss, aux), grads)`:
      loss: float32[], unscaled, of this device; the mean over the microbatches.
      grads: like the arguments in `argnums`, multiplied by the loss scale; in the params' dtypes, or float32 with
        `accumulate` > 1 or a policy with `reduce_dtype="float32"` (2 more bytes for each 16-bit param).
      aux: with `accumulate` > 1, stacked along a new leading axis [k], except for what `carry_argnum` carries.

    Raises:
      TypeError: a param is not a float array (named by path); the loss is not a float scalar; arguments in another
        order.
      ValueError: `opt_state` holds no loss scale; `accumulate` does not divide a leading axis, finds no batch among the
        positional arguments, or several arguments that may hold it; an axis name is not bound; the policy is not known,
        or is another one than that of the state.

    Warns:
      UserWarning: when the loss is traced: 16-bit params, or a policy that computes in 16 bits (the one given here, or
        that of the optimizer), and no matmul or convolution runs in 16 bits or fp8; a policy of fp8, and less than a
        quarter of the FLOPs of matmuls and convolutions run in it; fp8 layers whose scales are not differentiated;
        float16 matmuls without a loss scale; a float16 loss.

    Example:
      >>> import jaxmp, optax
      >>> policy = jaxmp.get_policy("fp16")
      >>> tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
      >>> params32 = {"w": jnp.array([2.0])}
      >>> opt_state, params = tx.init(params32), policy.cast_to_param(params32)
      >>> def loss_fn(params, x):
      ...     return jnp.mean(params["w"] * x)
      >>> loss, grads = value_and_grad(loss_fn, policy=policy)(params, jnp.ones(4), opt_state=opt_state)
      >>> float(loss), grads["w"].dtype.name
      (2.0, 'float16')
    """
    single = isinstance(argnums, int)
    if not single and not (isinstance(argnums, Sequence) and all(isinstance(i, int) for i in argnums)):
        raise TypeError(
            f"argnums must be positions; got {type(argnums).__name__}. Call value_and_grad(loss_fn)(params, *batch, "
            f"opt_state=opt_state)."
        )
    k = check_accumulate(accumulate)
    policy = None if policy is None else get_policy(policy)

    @functools.wraps(fun)
    def wrapped(*args: Any, opt_state: Any = None, **kwargs: Any) -> Any:
        diff_argnums = resolve_argnums(argnums, len(args), "argnums")
        check_call("value_and_grad(loss_fn)(params, *batch, opt_state=...)", args, diff_argnums, opt_state)
        check_params({i: args[i] for i in diff_argnums}, k)
        diff = tuple(args[i] for i in diff_argnums)
        carried = carried_arguments.chosen(carry_argnum, len(args), has_aux)
        batches, whole = split_arguments(args, (*diff_argnums, *carried), accumulate_argnums, k)

        def loss_fn(diff: Any, carry: Any, batch: Any) -> Any:
            arguments = dict(zip(diff_argnums, diff, strict=True)) | whole | batch | carry
            loss, aux = loss_and_aux(fun(*(arguments[i] for i in range(len(args))), **kwargs), has_aux, k)
            return loss, *carried_arguments.take(aux, carry)

        carry = {i: args[i] for i in carried}
        loss, aux, carry, grads = scaled_value_and_grad(
            loss_fn, diff, carry, batches, opt_state, policy=policy, k=k, axis_name=axis_name
        )
        aux = carried_arguments.put_back(aux, carry)
        return ((loss, aux) if has_aux else loss), (grads[0] if single else grads)

    signatures.with_keyword(wrapped, "opt_state")
    return wrapped


@scale_leaves.explained()
def scaled_value_and_grad(
    loss_fn: Callable[[PyTree, PyTree, PyTree], tuple[Any, PyTree, PyTree]],
    params: PyTree,
    carry: PyTree,
    batches: PyTree,
    opt_state: Any,
    *,
    policy: Policy | None,
    k: int,
    axis_name: collectives.AxisName,
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    """The core of `value_and_grad` and of its nnx twin, which passes mutable state through the microbatches.

    Args:
      loss_fn: `(params, carry, microbatch) -> (loss, aux, new carry)`.
      params: what to differentiate with respect to.
      carry: state passed from microbatch to microbatch.
      batches: tree with leading axis k; with k = 1, the microbatch itself.
      opt_state: holds the loss scale; or a TrainState.
      policy: None: the one that `opt_state` brings along, if any.
      k: number of microbatches.
      axis_name: see `value_and_grad`.

    Returns:
      `(loss float32[], aux, carry, scaled grads)`.
    """
    policy, is_default = policy_of_loss(policy, opt_state)
    opt_state = getattr(opt_state, "opt_state", opt_state)
    loss_scale = states.loss_scale_of(opt_state)
    states.check_not_stacked(loss_scale)
    axes = compat.manual_axes() if axis_name == "auto" else collectives.named_axes(axis_name)
    own_params = jax.tree.map(lambda x: compat.as_varying(x, axes), params)
    step_scale = loss_scale * np.float32(1.0 / k) if k > 1 else loss_scale
    # Each of n devices takes the mean over its own rows: its gradients are n times its part of the mean over all rows.
    gradient_scale = loss_scale * np.float32(math.prod(lax.axis_size(a) for a in axes))
    fp8 = Fp8Gradients(own_params, gradient_scale)
    calibrates, is_warned = ambient.FP8_CALIBRATING.value, False  # a loop of microbatches is traced again
    tracked, joint = [axis for axis in axes if compat.is_tracked(axis)], set()  # where all devices have one loss

    with policy_regions.around_loss(policy, is_default=is_default), ambient.noting() as notes:
        widens = policy is not None and policy.reduce_dtype is not None and rewrite.casts_here()
        if widens:
            loss_in_region = rewrite.with_float32_gradients(loss_fn, own_params)
            trained = jax.tree.map(
                lambda x: x.astype(jnp.float32) if casting.is_low_precision(x.dtype) else x, own_params
            )
        else:
            is_fp8 = policy is not None and policy.recipe is not None and not calibrates
            look = compute_dtypes.warn_of_little_fp8 if is_fp8 else None
            loss_in_region, trained = rewrite.by_region(loss_fn, look), own_params

        def scaled_loss(params: PyTree, carry: PyTree, batch: PyTree) -> Any:
            loss, aux, carry = loss_in_region(params, carry, batch)
            loss = jnp.asarray(loss).astype(jnp.float32)
            with jax.named_scope("jaxmp.scale_loss"):
                return loss * step_scale, (loss, aux, carry)

        def differentiated(loss: Callable[..., Any], check: Check | None) -> Callable[..., tuple[PyTree, Any]]:
            """`jax.grad(loss, has_aux=True)`, with checks between the forward and the backward pass."""

            def grad(params: PyTree, *args: Any) -> tuple[PyTree, Any]:
                nonlocal is_warned
                value, pullback, aux = jax.vjp(lambda params: loss(params, *args), params, has_aux=True)
                joint.update(axis for axis in tracked if axis not in compat.varying_axes(aux[0]))
                scale_reads.check_loss(aux[0], loss_scale)
                if check is not None:
                    check(pullback, value)
                if not is_warned and not calibrates and not regions.is_tracing():  # else autocast will cast it
                    noted = {"has_fp8": fp8.is_used, "fp8_matmuls": notes.fp8_matmuls}
                    is_warned = compute_dtypes.warn_of_wide(pullback, value, own_params, policy, opt_state, **noted)
                one = compat.as_varying(jnp.ones_like(value), tuple(compat.varying_axes(value)))
                return pullback(one)[0], aux

            return grad

        grad = fp8.grad(scaled_loss, differentiated)
        run = functools.partial(_one_batch if k == 1 else _microbatches, fp8, grad)
        if fp8.is_used or k > 1:
            # Outside jit, jax cannot combine the amaxes of a leaf that is used twice, and compiles each scan anew.
            run = compiled.once(run)
        loss, aux, carry, grads = run(trained, carry, batches)
    warn_of_unmoved_scales(notes.unmoved_scales)
    gathered_params.lift(notes)
    grads = _summed(grads, params, [axis for axis in axes if axis in joint], notes)
    grads = fp8.over_devices(grads, params)
    if not calibrates:
        scale_reads.note_scaled(grads, loss_scale, None if policy is None else policy.compute_dtype)
    return loss, aux, carry, grads


def _summed(grads: PyTree, params: PyTree, axes: Sequence[str], notes: ambient.Notes) -> PyTree:
    """Gradients of a loss that is one for all devices along `axes`, as `pmean` in a loss makes it.

    The gradients of a device are its part of the whole then, so they are summed, as jax does: in float32.
    """
    for note in notes.gathered_params:
        if note.cut and note.axis_name in axes:
            raise ValueError(
                f"with params cut over {note.axis_name!r}, the loss must be that of this device's rows; got one "
                f"that is the same on all devices. Take its pmean after value_and_grad."
            )

    def total(path: str, g: Array, p: Any) -> Array:
        own = tuple(axis for axis in axes if axis not in compat.varying_axes(p))
        if not own or scale_leaves.is_scale(path):
            return g
        return collectives.sum_over(g.astype(jnp.float32), own).astype(g.dtype)

    return tree_paths.map_with_path(total, grads, params) if axes else grads


def policy_of_loss(policy: Policy | None, opt_state: Any) -> tuple[Policy | None, bool]:
    """(the policy in which a loss runs, whether it came with the state: a TrainState, or its `opt_state`).

    A policy that does not say `keep_fp32` keeps the layers of the one that came with the state.

    Raises:
      ValueError: a policy that is not the state's, which the params and the loss scale are for.
    """
    carried = getattr(opt_state, "policy", None) or states.policy_of(getattr(opt_state, "opt_state", opt_state))
    if policy is None or carried is None:
        return policy or carried, policy is None
    if not policy.says_keep_fp32:
        policy = dataclasses.replace(policy, keep_fp32=carried.keep_fp32)
    fields = [field.name for field in dataclasses.fields(policy) if field.compare]
    if difference := first_difference(policy, carried, fields):
        field, other, own = difference
        raise ValueError(
            f"policy= must be that of the state; got {field}={other!s} in policy and {own!s} in the state. Leave out "
            f"policy=; for another precision, call it in `with jaxmp.autocast(...)`."
        )
    return policy, False


def _one_batch(
    fp8: Fp8Gradients, grad: Callable[..., Any], params: PyTree, carry: PyTree, batch: PyTree
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    grads, (loss, aux, new_carry) = grad(params, carry, batch)
    return loss, aux, carried_arguments.typed_like(new_carry, carry), grads


def _microbatches(
    fp8: Fp8Gradients, grad: Callable[..., Any], params: PyTree, carry: PyTree, batches: PyTree
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    def add_one(accumulated: Any, batch: PyTree) -> Any:
        sums, carry = accumulated
        grads, (loss, aux, new_carry) = grad(params, carry, batch)
        with jax.named_scope("jaxmp.accumulate"):
            return (fp8.add(sums, grads), carried_arguments.next_carry(new_carry, carry)), (loss, aux)

    def after_one(carry: PyTree) -> PyTree:
        return carried_arguments.next_carry(grad(params, carry, jax.tree.map(lambda x: x[0], batches))[1][2], carry)

    carry = carried_arguments.as_it_stays(after_one, carry)
    zeros = jax.tree.map(_zeros_like_float32, params)
    (grads, carry), (losses, aux) = lax.scan(add_one, (fp8.nothing(zeros), carry), batches)
    return jnp.sum(losses) * np.float32(1.0 / len(losses)), aux, carry, grads


def _zeros_like_float32(x: Array) -> Array:
    zeros = jnp.zeros_like(x, dtype=jnp.float32)  # sharded as x is, where axes are explicit
    return compat.as_varying(zeros, tuple(compat.varying_axes(x)))


def check_call(call: str, args: Sequence[Any], argnums: Sequence[int], opt_state: Any) -> None:
    """Raises for the arguments of a loss in a wrong order, and for a state without a loss scale.

    Args:
      call: the call as it is written, for the message.
      args: the positional arguments of the loss.
      argnums: the positions of those that are differentiated.
      opt_state: a state, or what holds one.
    """
    # A loss may take a state of its own, where `opt_state` is given by its name.
    looked = range(len(args)) if opt_state is None else argnums
    arguments = {f"argument {i}": ("tree" if i in argnums else "not a state", args[i]) for i in looked}
    argument_kinds.check(call, **arguments, opt_state=("state or holder", opt_state))
    if not states.has_loss_scale(getattr(opt_state, "opt_state", opt_state)):
        raise ValueError(
            f"opt_state must hold a loss scale; got {'None' if opt_state is None else 'a state without'}. Pass "
            f"opt_state=, the state of jaxmp.mixed_precision(...), or a TrainState or nnx.Optimizer with policy=."
        )


def check_params(params: dict[int, PyTree], k: int) -> None:
    """Raises for arguments, by position, without gradients, or whose gradients `k` microbatches cannot add up."""
    if any(isinstance(x, nnx.Module) for x in params.values()):
        raise TypeError("params must be arrays; got an nnx module. Use jaxmp.nnx.value_and_grad(loss_fn)(model, ...).")
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        if not casting.is_float(jnp.asarray(x) if isinstance(x, int | float | complex) else x):
            raise TypeError(
                f"params must be float; got {getattr(x, 'dtype', type(x).__name__)} at argument "
                f"{tree_paths.path_str(path)}. Pass it in another argument (in nnx, leave it out by wrt=nnx.LoRAParam)."
            )
    if k > 1 and (path := host_memory.first_on_host(params)) is not None:
        raise ValueError(
            f"with accumulate= params must be on the device; got {path} on the host. Use jaxmp.offload.stream_layers."
        )


def loss_and_aux(out: Any, has_aux: bool, k: int) -> tuple[Any, Any]:
    """`(loss, aux)` from the result of the loss function; aux is None without `has_aux`. Raises for other results."""
    if has_aux and (not isinstance(out, tuple | list) or len(out) != 2):
        got = f"{len(out)} values" if isinstance(out, tuple | list) else type(out).__name__
        raise TypeError(f"with has_aux=True the function must return (loss, aux); got {got}")
    loss, aux = out if has_aux else (out, None)
    is_number = isinstance(loss, jax.Array | np.ndarray | np.generic | int | float)
    if not is_number or jnp.ndim(loss) or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        got = f"{jnp.result_type(loss)}{list(jnp.shape(loss))}" if is_number else type(loss).__name__
        fix = "Return (loss, (aux, stats))" if has_aux else "Pass has_aux=True"
        fix = fix if isinstance(loss, tuple) else "Return it" if loss is None else "Reduce it with jnp.mean"
        raise TypeError(f"the loss must be a float scalar; got {got}. {fix}.")
    if jnp.result_type(loss) == jnp.float16:
        warn(
            "16-bit-loss",
            "the loss is float16, in which a scale above 65504 overflows in every step. Compute the loss in float32, "
            "for instance from logits.astype(jnp.float32).",
        )
    for path, x in jax.tree_util.tree_leaves_with_path(aux) if k > 1 else ():
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise TypeError(
                f"with accumulate= aux must be arrays or numbers; got {type(x).__name__} at "
                f"{tree_paths.path_str(path)}. Leave it out of aux."
            )
    return loss, aux
