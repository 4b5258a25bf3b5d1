"""Gradients of a scaled loss in the precision of a policy, and their accumulation over microbatches.

`value_and_grad` is `jax.value_and_grad` with four differences:

1.  It multiplies the loss by the scale in float32, inside the differentiated function. It returns the loss before this
    multiplication, never a loss that was scaled and divided again.
2.  The gradients are this device's own. Under `shard_map(check_vma=True)` autodiff would sum them over the mesh in
    float16, so the params are first cast to *varying* over the bound axes. Reduce the gradients yourself
    (`jax.lax.pmean`, or `jaxmp.reduce_gradients` in the chain).
3.  With `accumulate=k` the batch is cut into k microbatches. `lax.scan` runs over them, and their gradients are summed
    in float32: L = (1/k) sum_i L_i, each L_i scaled by S/k before differentiation, as in Megatron-LM. All k
    microbatches have one scale and one decision.
4. With `policy=`, the loss runs under the policy, forward and backward (`policy_regions`).

The gradients stay scaled. `unscale_and_skip` must unscale them with the scale that scaled them, so it reads the
`opt_state` that is passed here.
"""

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
from jaxmp._src.fp8 import scale_leaves, stored_kernels
from jaxmp._src.fp8.gradients import Fp8Gradients, warn_of_unmoved_scales
from jaxmp._src.numerics import casting
from jaxmp._src.step import (
    argument_kinds,
    batch_arguments,
    carried_arguments,
    compute_dtypes,
    policy_regions,
    scale_reads,
    state as states,
)
from jaxmp._src.step.microbatches import check_accumulate, resolve_argnums, split_arguments
from jaxmp._src.step.policy import Policy, get_policy


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
    keep_fp8_weights: bool = False,
) -> Callable[..., Any]:
    """A function that returns the loss and its *scaled* gradients; use it in place of `jax.value_and_grad`.

    With a policy, the loss runs in its precision: under `jaxmp.autocast` with its compute dtype, with linen's layers in
    fp8 where it says fp8, and with its matmul precision ("fp32", "tf32"). Modules keep a `dtype=` of their own, and a
    `with jaxmp.autocast(...)` inside the loss is the innermost. Without a policy nothing is cast.

    Args:
      fun: returns a scalar loss, or `(loss, aux)` with `has_aux`. Return the loss in float32.
      argnums: which positional arguments to differentiate with respect to.
      has_aux: whether `fun` returns `(loss, aux)`.
      policy: the policy of the optimizer, or its name; see `get_policy`. The `opt_state` of a `jaxmp.linen.TrainState`
        that was created with a policy brings it along, wherever `state.opt_state` is read (after the state has passed a
        `jax.jit`; an `opt_state` that passes alone is a plain one).
      accumulate: k, the number of microbatches, >= 1.
      accumulate_argnums: which positional arguments hold the batch; default: all that are not in `argnums`. Their
        arrays are cut along the leading axis, which k must divide; PRNG keys are split into k; scalars and keyword
        arguments are repeated. Name the batch if you pass other arrays too, such as class weights.
      carry_argnum: which positional argument is passed through the microbatches, such as BatchNorm's statistics: the
        loss returns its new value as aux, or as the first of two parts of aux. The next microbatch gets that value,
        and aux holds the last one, without an axis of microbatches.
      axis_name: manual axes over which the gradients stay this device's own: `"auto"` for all bound axes, or names.
        (Leave out a tensor-parallel axis over which autodiff should sum.)
      keep_fp8_weights: whether to cast the kernels of fp8 layers once for all microbatches instead of once for each:
        the same numbers, fewer passes, one more byte for each weight. The loss must use these kernels only in their
        layers.

    Returns:
      A function of `(*args, opt_state, **kwargs)`, where `opt_state` is the state of `mixed_precision` or of
      `shared_loss_scale`, or a TrainState, giving `(loss, grads)` or `((loss, aux), grads)`:
      loss: float32[], unscaled, of this device; the mean over the microbatches.
      grads: like the arguments in `argnums`, multiplied by the loss scale; in the params' dtypes, or float32 with
        `accumulate` > 1.
      aux: with `accumulate` > 1, stacked along a new leading axis [k], except for what `carry_argnum` carries.

    Raises:
      TypeError: a param is not a float array (named by path); the loss is not a float scalar; arguments in another
        order.
      ValueError: `opt_state` holds no loss scale; `accumulate` does not divide a leading axis, or finds no batch among
        the positional arguments, or a part of it that is passed on whole; an axis name is not bound; the policy is not
        known; an argument may hold the batch or not, and `accumulate_argnums` does not say so.

    Warns:
      UserWarning: when the loss is traced: 16-bit params, or a policy that computes in 16 bits (the one given here, or
        that of the optimizer), and no matmul or convolution runs in 16 bits or fp8; fp8 layers whose scales are not
        differentiated; float16 matmuls without a loss scale; a float16 loss; with `accumulate` > 1, microbatches that
        all draw the same random numbers.

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
    k = check_accumulate(accumulate)
    policy = None if policy is None else get_policy(policy)
    single = isinstance(argnums, int)
    if not single and not (isinstance(argnums, Sequence) and all(isinstance(i, int) for i in argnums)):
        raise TypeError(
            f"argnums must be a position or several; got {type(argnums).__name__}. The arguments of the loss come in a "
            f"second call: value_and_grad(loss_fn)(params, *batch, opt_state=opt_state)."
        )
    seen: set[Any] = set()

    @functools.wraps(fun)
    @carried_arguments.asks_for_carry(fun, k, argnums, has_aux=has_aux, carry_argnum=carry_argnum)
    def wrapped(*args: Any, opt_state: Any = None, **kwargs: Any) -> Any:
        diff_argnums = resolve_argnums(argnums, len(args), "argnums")
        diff = tuple(args[i] for i in diff_argnums)
        check_order(args, diff_argnums, opt_state, "value_and_grad(loss_fn)(params, *batch, opt_state=...)")
        carried = carried_arguments.chosen(carry_argnum, len(args), has_aux)
        batches, whole = split_arguments(args, (*diff_argnums, *carried), accumulate_argnums, k)

        def loss_fn(diff: Any, carry: Any, batch: Any, others: Any = whole | kwargs) -> Any:
            given = dict(zip(diff_argnums, diff, strict=True)) | others | batch | carry
            out = fun(*(given[i] for i in range(len(args))), **{name: given[name] for name in kwargs})
            loss, aux = loss_and_aux(out, has_aux)
            return loss, *carried_arguments.take(aux, carry)

        carry = {i: args[i] for i in carried}
        with batch_arguments.checked(
            seen,
            (args, kwargs),
            lambda batch, carry, others: loss_fn(diff, carry, batch, others)[0],
            {i: args[i] for i in batches},
            carry,
            whole | kwargs,
            k,
            named=accumulate_argnums is not None,
        ):
            loss, aux, carry, grads = scaled_value_and_grad(
                loss_fn,
                diff,
                carry,
                batches,
                opt_state,
                policy=policy,
                k=k,
                axis_name=axis_name,
                keep_fp8_weights=keep_fp8_weights,
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
    keep_fp8_weights: bool = False,
    looks: bool = True,
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
      axis_name, keep_fp8_weights: see `value_and_grad`.
      looks: whether to look in which dtypes the loss computes, and what it reads; a plan of memory, which trains
        nothing, does not.

    Returns:
      `(loss float32[], aux, carry, scaled grads)`.
    """
    carried = getattr(opt_state, "policy", None)  # of a TrainState or nnx optimizer, or of their opt_state
    opt_state = getattr(opt_state, "opt_state", opt_state)
    _check_has_loss_scale(opt_state)
    _check_differentiable(params)
    if k > 1:
        _check_on_device(params, k)
    loss_scale = states.get_loss_scale(opt_state)
    axes = compat.manual_axes() if axis_name == "auto" else collectives.named_axes(axis_name)
    own_params = jax.tree.map(lambda x: compat.as_varying(x, axes), params)
    step_scale = loss_scale * np.float32(1.0 / k) if k > 1 else loss_scale
    # Each of n devices takes the mean over its own rows: its gradients are n times its part of the mean over all rows.
    gradient_scale = loss_scale * np.float32(math.prod(lax.axis_size(a) for a in axes))
    fp8 = Fp8Gradients(own_params, gradient_scale, keep_kernels=keep_fp8_weights)

    is_default = policy is None
    policy = carried or states.policy_of(opt_state) if policy is None else policy
    with policy_regions.around_loss(policy, is_default=is_default), ambient.noting() as notes:
        loss_in_region = rewrite.by_region(loss_fn)

        def scaled_loss(params: PyTree, carry: PyTree, batch: PyTree) -> Any:
            loss, aux, carry = loss_in_region(params, carry, batch)
            loss = _checked_loss(loss)
            with jax.named_scope("jaxmp.scale_loss"):
                return loss * step_scale, (loss, aux, carry)

        look = _look_once(params, policy, opt_state, fp8.is_used, notes) if looks else lambda *_: None
        grad = fp8.grad(
            scaled_loss, lambda loss, check: compute_dtypes.differentiated(loss, look, check if looks else None)
        )
        run = _one_batch if k == 1 else _microbatches
        loss, aux, carry, grads = run(fp8, grad, own_params, carry, batches)
    warn_of_unmoved_scales(notes.unmoved_scales)
    gathered_params.lift(notes)
    grads = fp8.over_devices(grads, params)
    scale_reads.note_scaled(grads, loss_scale)
    return loss, aux, carry, grads


def _look_once(
    params: PyTree, policy: Policy | None, opt_state: Any, has_fp8: bool, notes: ambient.Notes
) -> Callable[..., None]:
    """What looks at the derivative of the loss, and warns once: a loop may trace the loss more than once."""
    lists = regions.current()
    scales, is_off = states.may_scale(opt_state), lists is not None and lists.dtype is None
    of_low = states.computes_low(opt_state) and not has_fp8  # what has fp8 scales warns of them itself
    warned = False

    def look(pullback: Any, value: Any) -> None:
        nonlocal warned
        warned = warned or compute_dtypes.check(
            pullback,
            value,
            params,
            policy,
            scales=scales,
            of_low=of_low,
            is_off=is_off,
            fp8_matmuls=notes.fp8_matmuls,
        )

    return look


def _one_batch(
    fp8: Fp8Gradients, grad: Callable[..., Any], params: PyTree, carry: PyTree, batch: PyTree
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    if fp8.is_used:  # outside jit, jax cannot combine the amaxes of a leaf that is used twice
        grad = jax.jit(grad, inline=True)
    grads, (loss, aux, carry) = grad(params, carry, batch)
    return loss, aux, carry, grads


def _microbatches(
    fp8: Fp8Gradients, grad: Callable[..., Any], params: PyTree, carry: PyTree, batches: PyTree
) -> tuple[Float[Array, ""], PyTree, PyTree, PyTree]:
    def add_one(accumulated: Any, batch: PyTree) -> Any:
        sums, carry = accumulated
        grads, (loss, aux, new_carry) = grad(params, carry, batch)
        _check_stackable(aux)
        with jax.named_scope("jaxmp.accumulate"):
            return (fp8.add(sums, grads), carried_arguments.typed_like(new_carry, carry)), (loss, aux)

    def after_one(carry: PyTree) -> PyTree:
        return grad(params, carry, jax.tree.map(lambda x: x[0], batches))[1][2]

    carry = carried_arguments.as_it_stays(after_one, carry)
    zeros = jax.tree.map(_zeros_like_float32, params)
    (grads, carry), (losses, aux) = lax.scan(add_one, (zeros, carry), batches)
    return jnp.sum(losses) * np.float32(1.0 / len(losses)), aux, carry, grads


def _check_stackable(aux: PyTree) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(aux):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise TypeError(
                f"with accumulate= aux must be arrays or numbers, which are stacked over the microbatches; got "
                f"{type(x).__name__} at {tree_paths.path_str(path)} of aux. Leave it out of aux."
            )


def _zeros_like_float32(x: Array) -> Array:
    zeros = jnp.zeros_like(x, dtype=jnp.float32)  # sharded as x is, where axes are explicit
    return compat.as_varying(zeros, tuple(compat.varying_axes(x)))


def check_order(args: Sequence[Any], diff_argnums: Sequence[int], opt_state: Any, call: str) -> None:
    """Raises a TypeError for an optimizer's state by position, and what else stands in a wrong place of `call`."""
    given = {f"argument {i}": ("tree" if i in diff_argnums else "not a state", x) for i, x in enumerate(args)}
    if opt_state is not None:  # a loss may take a state of its own
        given = {name: found for name, found in given.items() if found[0] == "tree"}
    argument_kinds.check(call, **given, opt_state=("state or holder", opt_state))


def _check_has_loss_scale(opt_state: Any) -> None:
    if not states.has_loss_scale(opt_state):
        raise ValueError(
            "opt_state must hold the loss scale that the update unscales with; "
            + ("it was not given. Pass opt_state=, " if opt_state is None else "it holds none. Pass ")
            + "the state of jaxmp.mixed_precision(...).init(params) (with loss_scale=None for none), or of "
            "jaxmp.shared_loss_scale."
        )


def _check_on_device(params: PyTree, k: int) -> None:
    path = host_memory.first_on_host(params)
    if path is not None:
        raise ValueError(
            f"accumulate={k} adds gradients on the device; got params in host memory at argument {path}, whose "
            f"gradients lie there too. Use jaxmp.offload.stream_layers(..., num_microbatches={k}) without accumulate."
        )


def _check_differentiable(params: PyTree) -> None:
    if any(isinstance(x, nnx.Module) for x in (params if isinstance(params, tuple) else ())):
        raise TypeError(
            "params must be a pytree of arrays; got an nnx module, which holds other state too. Use "
            "jaxmp.nnx.value_and_grad(loss_fn)(model, ...)"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        as_array = jnp.asarray(x) if isinstance(x, (int, float, complex)) else x
        if not (casting.is_float(as_array) or stored_kernels.is_stored(x)):
            raise TypeError(
                f"gradients of a scaled loss need float params; got {getattr(x, 'dtype', type(x).__name__)} at "
                f"argument {tree_paths.path_str(path)}. Pass such leaves in another argument, which is not in argnums."
            )


def loss_and_aux(out: Any, has_aux: bool) -> tuple[Any, Any]:
    """`(loss, aux)` from the result of the loss function; aux is None without `has_aux`."""
    if not has_aux:
        return out, None
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"with has_aux=True the function must return (loss, aux); got {got}")
    return out[0], out[1]


def _checked_loss(loss: Any) -> Float[Array, ""]:
    is_array = isinstance(loss, jax.Array | np.ndarray | np.generic | int | float)
    if not is_array or jnp.ndim(loss) != 0 or not jnp.issubdtype(jnp.result_type(loss), jnp.floating):
        got = f"{jnp.result_type(loss)}{list(jnp.shape(loss))}" if is_array else type(loss).__name__
        raise TypeError(
            f"the loss must be a float scalar; got {got}. Reduce it with jnp.mean, and return (loss, aux) only with "
            f"has_aux=True."
            + (
                " watch_activations returns ((loss, aux), stats): return (loss, (aux, stats))."
                if isinstance(loss, tuple)
                else ""
            )
        )
    if jnp.result_type(loss) == jnp.float16:
        warn(
            "16-bit-loss",
            "the loss is float16, so the loss scale must fit into float16 in the backward pass: with a scale above "
            "65504, such as the default 65536, every step overflows. Compute the loss in float32, for instance from "
            "logits.astype(jnp.float32).",
        )
    return jnp.asarray(loss).astype(jnp.float32)
