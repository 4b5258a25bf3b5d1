"""Guards of the loss: the public `value_and_grad`, and what its twin for nnx and `calibrate` share with it.

They look at the arguments of a call, at what the loss returns, and at its derivative; see `compute_dtypes`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax import nnx
from jaxtyping import PyTree

from jaxmp._src.base import signatures, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import collectives, host_memory
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.guard import argument_kinds, compute_dtypes, scale_reads, state_readers
from jaxmp._src.guard.batch import look_at_batch
from jaxmp._src.numerics import casting
from jaxmp._src.step import (
    calibrate as calibration,
    carried_arguments,
    microbatches,
    state as states,
    value_and_grad as step,
)


@functools.wraps(step.value_and_grad)
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
    if not isinstance(argnums, int) and not (
        isinstance(argnums, Sequence) and all(isinstance(i, int) for i in argnums)
    ):
        raise TypeError(
            f"argnums must be a position or several; got {type(argnums).__name__}. The arguments of the loss come in a "
            f"second call: value_and_grad(loss_fn)(params, *batch, opt_state=opt_state)."
        )
    k = microbatches.check_accumulate(accumulate)
    gradients = functools.partial(
        step.gradients_of,
        looked_at(fun, has_aux, k),
        argnums,
        has_aux,
        policy=policy,
        accumulate=accumulate,
        accumulate_argnums=accumulate_argnums,
        carry_argnum=carry_argnum,
        axis_name=axis_name,
    )
    gradients()  # checks the arguments

    @functools.wraps(fun)
    def wrapped(*args: Any, opt_state: Any = None, **kwargs: Any) -> Any:
        diff = microbatches.resolve_argnums(argnums, len(args), "argnums")
        look_at_order(args, diff, opt_state, "value_and_grad(loss_fn)(params, *batch, opt_state=...)")
        look_at_loss_scale(opt_state)
        params = {i: args[i] for i in diff}
        look_at_params(params, k)
        others = (*diff, *carried_arguments.chosen(carry_argnum, len(args), has_aux))
        loss_of = lambda batch: fun(*(batch.get(i, x) for i, x in enumerate(args)), **kwargs)  # noqa: E731
        look_at_batch(loss_of, args, others, accumulate_argnums, k)
        found = gradients(look=compute_dtypes.looks_once())(*args, opt_state=opt_state, **kwargs)
        scale_reads.note_scaled(found[1], opt_state)
        return found

    signatures.with_keyword(wrapped, "opt_state")
    return wrapped


@functools.wraps(calibration.calibrate)
def calibrate(fun: Any, *args: Any, tx: Any, opt_state: Any, argnums: int | Sequence[int] = 0, **options: Any) -> Any:
    params = args[argnums] if isinstance(argnums, int) else tuple(args[i] for i in argnums)
    argument_kinds.check(
        "calibrate(loss_fn, params, *batch, tx=tx, opt_state=opt_state)",
        loss_fn=("function", fun),
        params=("params", params),
        tx=("optimizer", tx),
        opt_state=("state", opt_state),
    )
    _look_at_histories(opt_state, params)
    looked = looked_at(fun, options.get("has_aux", False), options.get("accumulate", 1))
    return calibration.calibrate(looked, *args, tx=tx, opt_state=opt_state, argnums=argnums, **options)


def _look_at_histories(opt_state: Any, params: PyTree) -> None:
    """Raises a ValueError for a calibration that would fill no history."""
    state_readers.check_is_state(opt_state, "calibrate")
    if not states.find(opt_state, states.Fp8State):
        raise ValueError(
            "calibrate fills the amax histories of delayed scaling; opt_state holds none. Recipes without state need "
            "no calibration; for DelayedScaling, make the optimizer with jaxmp.mixed_precision(inner, policy, "
            "recipe=recipe) and params that hold scales."
        )
    if not scale_leaves.has_scales(params):
        raise ValueError(
            "calibrate moves the fp8 scales among the params; got an argument without any as the params. The order is "
            "calibrate(loss_fn, params, *batch, tx=tx, opt_state=opt_state), and argnums= says where the params stand."
        )
    if any(states.find(steps, states.Fp8State) for steps in states.find(opt_state, optax.MultiStepsState)):
        raise ValueError(
            "calibrate takes one step of the scales, and optax.MultiSteps takes none before its last; got an opt_state "
            "with amax histories inside of it. Put mixed_precision around MultiSteps, or use accumulate= of "
            "jaxmp.value_and_grad in its place."
        )


def looked_at(fun: Callable[..., Any], has_aux: bool, k: int) -> Callable[..., Any]:
    """The loss function, with a look at what it returns."""

    @functools.wraps(fun)
    def looked(*args: Any, **kwargs: Any) -> Any:
        out = fun(*args, **kwargs)
        if has_aux and (not isinstance(out, (tuple, list)) or len(out) != 2):
            got = f"{len(out)} values" if isinstance(out, (tuple, list)) else type(out).__name__
            raise TypeError(f"with has_aux=True the function must return (loss, aux); got {got}")
        loss, aux = out if has_aux else (out, None)
        _look_at_loss(loss)
        if k > 1:
            _look_at_stacked(aux)
        return out

    return looked


def _look_at_loss(loss: Any) -> None:
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


def _look_at_stacked(aux: PyTree) -> None:
    for path, x in jax.tree_util.tree_leaves_with_path(aux):
        if not isinstance(x, jax.Array | np.ndarray | np.generic | bool | int | float | complex):
            raise TypeError(
                f"with accumulate= aux must be arrays or numbers, which are stacked over the microbatches; got "
                f"{type(x).__name__} at {tree_paths.path_str(path)} of aux. Leave it out of aux."
            )


def look_at_order(args: Sequence[Any], diff_argnums: Sequence[int], opt_state: Any, call: str) -> None:
    """Raises a TypeError for an optimizer's state by position, and what else stands in a wrong place of `call`."""
    given = {f"argument {i}": ("tree" if i in diff_argnums else "not a state", x) for i, x in enumerate(args)}
    if opt_state is not None:  # a loss may take a state of its own
        given = {name: found for name, found in given.items() if found[0] == "tree"}
    argument_kinds.check(call, **given, opt_state=("state or holder", opt_state))


def look_at_loss_scale(opt_state: Any) -> None:
    """Raises a ValueError for a state without the scale that the update will unscale with."""
    if not states.has_loss_scale(getattr(opt_state, "opt_state", opt_state)):
        raise ValueError(
            "opt_state must hold the loss scale that the update unscales with; "
            + ("it was not given. Pass opt_state=, " if opt_state is None else "it holds none. Pass ")
            + "the state of jaxmp.mixed_precision(...).init(params) (with loss_scale=None for none), or of "
            "jaxmp.shared_loss_scale; or opt_state=state, a jaxmp.linen.TrainState or jaxmp.nnx.Optimizer that was "
            "created with policy=."
        )


def look_at_params(params: dict[int, PyTree], k: int) -> None:
    """Raises for arguments that cannot be differentiated, or whose gradients cannot be added up."""
    if any(isinstance(x, nnx.Module) for x in params.values()):
        raise TypeError(
            "params must be a pytree of arrays; got an nnx module, which holds other state too. Use "
            "jaxmp.nnx.value_and_grad(loss_fn)(model, ...)"
        )
    for path, x in jax.tree_util.tree_leaves_with_path(params):
        as_array = jnp.asarray(x) if isinstance(x, (int, float, complex)) else x
        if not casting.is_float(as_array):
            raise TypeError(
                f"gradients of a scaled loss need float params; got {getattr(x, 'dtype', type(x).__name__)} at "
                f"argument {tree_paths.path_str(path)}. Pass such leaves in another argument, which is not in argnums."
            )
    path = host_memory.first_on_host(params) if k > 1 else None
    if path is not None:
        raise ValueError(
            f"accumulate={k} adds gradients on the device; got params in host memory at argument {path}, whose "
            f"gradients lie there too. Use jaxmp.offload.stream_layers(..., num_microbatches={k}) without accumulate."
        )
