"""flax.nnx: gradients of a scaled loss of a module with state, and undoing the state of a skipped step.

`nnx.Optimizer(model, jaxmp.mixed_precision(...), wrt=nnx.Param)` works unchanged; `cast_to_param` gives the module its
16-bit params after the optimizer was made from float32. nnx modules also have state that changes in the forward pass:
BatchNorm's statistics and the counts of Dropout's keys. `value_and_grad` passes it through the microbatches and writes
it back into the module; `restore_if_skipped` restores the statistics after a skipped step.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jmp
import optax
from flax import nnx
from jaxtyping import Array, PyTree

from jaxmp._src.autocast import flax_layers
from jaxmp._src.base import signatures, tree_paths
from jaxmp._src.bridges import policy_argument
from jaxmp._src.devices import collectives
from jaxmp._src.fp8.nnx_layers import Fp8Scale, to_fp8
from jaxmp._src.step import (
    argument_kinds,
    calibrate,
    microbatches,
    policy as policy_lib,
    reload_masters,
    scales,
    state as states,
    transform,
    value_and_grad as gradients,
)


def value_and_grad(
    fun: Callable[..., Any],
    *,
    argnums: int | nnx.DiffState = 0,
    wrt: Any = nnx.Param,
    has_aux: bool = False,
    policy: str | jmp.Policy | None = None,
    accumulate: int = 1,
    accumulate_argnums: Any = None,
    axis_name: collectives.AxisName = "auto",
) -> Callable[..., Any]:
    """`jaxmp.value_and_grad` for a function of an nnx module: `fun(model, *args) -> loss`, or `(loss, aux)`.

    The module's other state (BatchNorm's statistics, Dropout's keys) is updated in place, as in `nnx.value_and_grad`,
    and so are other arguments of nnx (`nnx.Rngs`, a module); with `accumulate=k` it passes through the k microbatches.

    Args:
      fun: the loss; its first argument is the module.
      argnums: 0, the module; or `nnx.DiffState(0, filter)`, as in flax, which is `wrt=filter`.
      wrt: filter of the variables to differentiate with respect to; the same as for `nnx.Optimizer`. The scales of fp8
        layers (`Fp8Scale`) always belong to them, also with `wrt=nnx.LoRAParam`.
      has_aux: whether `fun` returns `(loss, aux)`.
      policy: the policy of the optimizer, or its name; the loss runs in its precision, as in `jaxmp.value_and_grad`.
        For "fp8", call `to_fp8(model)` before you make the optimizer.
      accumulate: number of microbatches.
      accumulate_argnums: positions (0 is the module) of the arguments that hold the batch; default: all but the module.
      axis_name: see `jaxmp.value_and_grad`.

    Returns:
      A function of `(model, *args, opt_state=optimizer.opt_state, **kwargs)`, where `opt_state` may be the optimizer
      itself, giving `(loss, grads)` or `((loss, aux), grads)`, with grads an `nnx.State` for
      `optimizer.update(model, grads)`.

    Raises:
      ValueError, TypeError: as `jaxmp.value_and_grad`; and for `argnums` that name another argument than the module.

    Example:
      >>> import jax.numpy as jnp, jaxmp, optax
      >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), wrt=nnx.Param)
      >>> cast_to_param(model, "bf16")
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x) ** 2)
      >>> loss, grads = value_and_grad(loss_fn, policy="bf16")(model, jnp.ones((4, 3)), opt_state=optimizer.opt_state)
      >>> _ = optimizer.update(model, grads)
      >>> model.kernel[...].dtype.name
      'bfloat16'
    """
    k = microbatches.check_accumulate(accumulate)
    policy = None if policy is None else policy_lib.get_policy(policy)
    chosen = _filter_of(argnums, wrt)

    @functools.wraps(fun)
    def wrapped(model: nnx.Module, *args: Any, opt_state: Any = None, **kwargs: Any) -> Any:
        gradients.check_call("value_and_grad(loss_fn)(model, *batch, opt_state=...)", (model, *args), (), opt_state)
        wrt = _with_scales(model, chosen)
        passed = {i: x for i, x in enumerate(args, 1) if nnx.graph.is_graph_node(x)}  # nnx.Rngs, another module
        graphdef, params, rest = _split((model, *passed.values()), wrt)
        gradients.check_params({0: params}, k)
        batches, whole = microbatches.split_arguments((model, *args), (0, *passed), accumulate_argnums, k)

        def loss_fn(params: PyTree, rest: PyTree, batch: PyTree) -> Any:
            merged = nnx.merge(graphdef, nnx.State({0: params}), rest, copy=True)
            arguments = whole | batch | dict(zip(passed, merged[1:], strict=True))
            run = flax_layers.with_modules(fun, (merged[0],))
            out = run(merged[0], *(arguments[i] for i in range(1, len(args) + 1)), **kwargs)
            loss, aux = gradients.loss_and_aux(out, has_aux, k)
            return loss, aux, _split(merged, wrt)[2]

        loss, aux, rest, grads = gradients.scaled_value_and_grad(
            loss_fn, params, rest, batches, opt_state, policy=policy, k=k, axis_name=axis_name
        )
        for i, x in enumerate((model, *passed.values())):
            if i in rest:
                nnx.update(x, rest[i])
        return ((loss, aux) if has_aux else loss), grads

    signatures.with_keyword(wrapped, "opt_state")
    return wrapped


class Optimizer(nnx.Optimizer):
    """`nnx.Optimizer` that starts from float32 params, casts the module, and writes 16-bit params directly.

    flax's own works too: make it, then call `cast_to_param`. This class does both, uses `jaxmp.apply_gradients` (always
    exact, two bytes per parameter less), and does not count skipped steps.

    Args:
      model: the module, with float32 params.
      tx: an optimizer of optax, which becomes `jaxmp.mixed_precision(tx, policy)`; or `jaxmp.mixed_precision(...)`.
      wrt: filter of the variables to optimize. The scales of fp8 layers (`Fp8Scale`) always belong to them, also with
        `wrt=nnx.LoRAParam`: gradients go through layers with frozen weights, too. With a kind of `nnx.Param` such as
        this one, `policy` casts all other `nnx.Param` of the module as well, the frozen base. With another filter it
        casts what the filter chooses; cast a frozen base yourself: `jaxmp.nnx.cast_to_param(model, policy)`.
      policy: the policy of `tx`; None does not cast the module. The optimizer carries it: with `opt_state=optimizer`,
        `value_and_grad` needs no `policy=`. With "fp8", a model without fp8 layers goes through `to_fp8` first.
      keep_fp32: as for `get_policy`, with a `tx` of optax.
      loss_scale: as for `mixed_precision`, with a `tx` of optax.

    Raises:
      TypeError: `keep_fp32` or `loss_scale` with a `tx` of jaxmp.
      ValueError: `policy` with a `tx` of jaxmp that keeps no masters, or that was made with another policy.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, optax.adam(1e-3), policy="fp16")
      >>> def loss_fn(model, x):
      ...     return jnp.mean(model(x) ** 2)
      >>> loss, grads = value_and_grad(loss_fn)(model, jnp.ones((4, 3)), opt_state=optimizer)
      >>> optimizer.update(model, grads)
      >>> model.kernel[...].dtype.name, int(optimizer.step[...])
      ('float16', 1)
    """

    def __init__(
        self,
        model: nnx.Module,
        tx: optax.GradientTransformation,
        *,
        wrt: Any = nnx.Param,
        policy: str | jmp.Policy | None = None,
        keep_fp32: Any = None,
        loss_scale: Any = "auto",
    ):
        tx, chosen = policy_argument.wrapped(tx, policy, keep_fp32, loss_scale)
        if chosen is not None and scales.is_delayed(chosen.recipe):
            if not jax.tree.leaves(nnx.state(model, Fp8Scale)):
                to_fp8(model, chosen.recipe)
        wrt = _with_scales(model, wrt)

        whole = _with_frozen_base(wrt)
        with warnings.catch_warnings():
            if whole is not wrt:  # patterns of keep_fp32 may be for the base, which tx does not see
                warnings.filterwarnings("ignore", message="keep_fp32: ")
            super().__init__(model, tx, wrt=wrt)
        self.tx, self.policy = tx, chosen
        if self.policy is not None:
            cast_to_param(model, self.policy, wrt=whole)
            if whole is not wrt:
                paths = [path for path, _ in tree_paths.boxed_leaves(nnx.state(model, whole))[0]]
                tree_paths.warn_of_idle("keep_fp32", self.policy.keep_fp32, paths, of="param")

    def update(self, model: nnx.Module, grads: PyTree, /, **kwargs: Any) -> None:
        """One step: updates the params of `model` and this optimizer's state in place, unless the step is skipped.

        Args:
          model: the module.
          grads: scaled gradients from `value_and_grad`, reduced over devices.
          **kwargs: extra arguments of `tx.update`.
        """
        pure = nnx.as_pure
        grads, opt_state, params = pure(grads), pure(self.opt_state), pure(nnx.state(model, self.wrt))
        if self.policy is not None:
            policy_argument.check_taken(self.policy, opt_state, grads, params)
        params, opt_state = transform.apply_gradients(self.tx, grads, opt_state, params, **pure(kwargs))
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state))
        self.step[...] = states.keep_if_skipped(opt_state, self.step[...] + 1, self.step[...])

    def reload_master_params(self, model: nnx.Module) -> None:
        """Makes the masters from the params of `model`, in place, after you changed these (`nnx.update`, a restore).

        Without it, the next `update` would write the old masters back. Moments and counts stay. For flax's
        `nnx.Optimizer`: `optimizer.opt_state = jaxmp.reload_master_params(optimizer.opt_state, nnx.state(model, wrt))`.

        Args:
          model: the module; its params in float32 (masters then have full precision) or as the policy casts them. With
            the `policy=` of this optimizer they are cast afterwards, as at the start.

        Example:
          >>> import jax.numpy as jnp, jaxmp, optax
          >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
          >>> optimizer = Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), policy="bf16")
          >>> nnx.update(model, {"kernel": jnp.full((3, 2), 0.3)})  # loaded weights
          >>> optimizer.reload_master_params(model)
          >>> optimizer.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param)))
          >>> model.kernel[0, 0]
          Array(0.300781, dtype=bfloat16)
        """
        pure = nnx.as_pure
        opt_state = reload_masters.reload_master_params(pure(self.opt_state), pure(nnx.state(model, self.wrt)))
        nnx.update(self.opt_state, nnx.state(opt_state))
        if self.policy is not None:
            cast_to_param(model, self.policy, wrt=_with_frozen_base(self.wrt))

    def master_params(self, model: nnx.Module) -> nnx.State:
        """The params that this optimizer trains, in float32: for averages, targets, teachers and export.

        An average of 16-bit params stalls: a small step of it is rounded to nothing. `nnx.update(other, params)` writes
        them into another module, which has float32 params then.

        Args:
          model: the module; a remainder of `remainder_bits=` and a float32 param need its params.

        Example:
          >>> import jax.numpy as jnp, optax
          >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
          >>> optimizer = Optimizer(model, optax.adam(1e-3), policy="bf16")
          >>> model.kernel[...].dtype.name, optimizer.master_params(model)["kernel"][...].dtype.name
          ('bfloat16', 'float32')
        """
        return states.get_master_params(nnx.as_pure(self.opt_state), nnx.state(model, self.wrt))

    @property
    def metrics(self) -> dict[str, Array]:
        """`jaxmp.get_metrics` of this optimizer's state.

        Example:
          >>> import jaxmp, optax
          >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
          >>> optimizer = Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "fp16"), policy="fp16")
          >>> float(optimizer.metrics["loss_scale"])
          65536.0
        """
        return states.get_metrics(nnx.as_pure(self.opt_state))

    def calibrate(self, model: nnx.Module, fun: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Sets the fp8 scales of `model` and the amax histories of this optimizer from one batch, in place.

        The other state of the module (statistics, counts of keys) stays as it is. See `jaxmp.fp8.calibrate`.

        Args:
          model: the module.
          fun: the loss, called as `fun(model, *args)`.
          *args: its arguments behind the module.
          **kwargs: as for `jaxmp.fp8.calibrate`: `has_aux`, `policy`, `accumulate`, ..., and arguments of `fun`.

        Raises:
          TypeError: the loss and the module are swapped.
        """
        if isinstance(fun, nnx.Module):
            raise TypeError(
                f"the arguments are optimizer.calibrate(model, loss_fn, *batch); got {type(fun).__name__} as loss_fn."
            )
        graphdef, params, rest = nnx.split(model, self.wrt, ...)

        def of_params(params: PyTree, *args: Any, **kwargs: Any) -> Any:
            model = nnx.merge(graphdef, params, rest, copy=True)
            return flax_layers.with_modules(fun, (model,))(model, *args, **kwargs)

        kwargs.setdefault("policy", self.policy)
        opt_state = nnx.as_pure(self.opt_state)
        params, opt_state = calibrate.calibrate(
            of_params, nnx.as_pure(params), *args, tx=self.tx, opt_state=opt_state, **kwargs
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state))


def cast_to_param(model: nnx.Module, policy: str | jmp.Policy, *, wrt: Any = nnx.Param) -> None:
    """Casts the params of `model` in place by `policy`; call it after you made the `nnx.Optimizer`.

    Args:
      model: the module, with float32 params.
      policy: the policy of the optimizer.
      wrt: filter of the params.

    Example:
      >>> model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
      >>> cast_to_param(model, "fp16")
      >>> model.bias[...].dtype.name
      'float16'
    """
    policy = policy_lib.get_policy(policy)
    nnx.update(model, policy.cast_to_param(nnx.state(model, wrt)))


def _filter_of(argnums: Any, wrt: Any) -> Any:
    """The filter of the variables to differentiate with respect to, from the two ways to say it."""
    if isinstance(wrt, nnx.DiffState):
        raise TypeError("wrt must be a filter; got an nnx.DiffState. Pass argnums=nnx.DiffState(0, filter).")
    argnum = argnums.argnum if isinstance(argnums, nnx.DiffState) else argnums
    if argnum != 0:
        raise ValueError(f"argnums must be 0, the module; got {argnums!r}. Put several in one: nnx.Dict(a=a, b=b).")
    if isinstance(argnums, nnx.DiffState) and wrt is not nnx.Param:
        raise ValueError("the filter must be said once; got argnums=nnx.DiffState(...) and wrt=. Leave out wrt=.")
    return argnums.filter if isinstance(argnums, nnx.DiffState) else wrt


def _split(modules: tuple[Any, ...], wrt: Any) -> tuple[Any, PyTree, PyTree]:
    """(graph of all modules, the variables of the first that fit `wrt`, all others); modules may share variables."""
    fits = nnx.filterlib.to_predicate(wrt)
    graphdef, params, rest = nnx.split(modules, lambda path, x: path[0] == 0 and fits(path[1:], x), ...)
    return graphdef, params.get(0, nnx.State({})), rest


def _with_scales(model: nnx.Module, wrt: Any) -> Any:
    """The filter `wrt`, or, if `model` has fp8 scales that it leaves out, the filter of both."""
    chosen = nnx.filterlib.to_predicate(wrt)
    left_out = nnx.state(model, lambda path, x: isinstance(x, Fp8Scale) and not chosen(path, x))
    return nnx.Any(wrt, Fp8Scale) if jax.tree.leaves(left_out) else wrt


def _with_frozen_base(wrt: Any) -> Any:
    """The filter `wrt`, or all of `nnx.Param` if it names kinds of them: what else is there is a frozen base.

    Params that a filter of paths leaves out may be those of another optimizer, which makes its masters later.
    """

    def are_params(predicate: Any) -> bool:
        if isinstance(predicate, nnx.filterlib.Any):
            return all(map(are_params, predicate.predicates))
        return isinstance(predicate, nnx.filterlib.OfType) and issubclass(predicate.type, nnx.Param)

    return nnx.Any(wrt, nnx.Param) if are_params(nnx.filterlib.to_predicate(wrt)) else wrt


def snapshot(model: nnx.Module, *filters: Any) -> nnx.State:
    """The current values of variables, for `restore_if_skipped`.

    Args:
      model: the module.
      *filters: which variables; default: `nnx.BatchStat`.

    Returns:
      An `nnx.State` that later changes of the module do not affect.

    Example:
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> sorted(snapshot(model))
      ['mean', 'var']
    """
    return jax.tree.map(lambda x: x, nnx.state(model, filters[0] if len(filters) == 1 else filters or nnx.BatchStat))


def restore_if_skipped(opt_state: Any, model: nnx.Module, before: nnx.State) -> None:
    """Writes the values of `before` back into `model` if the last update was skipped.

        before = jaxmp.nnx.snapshot(model)
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, batch, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        jaxmp.nnx.restore_if_skipped(optimizer.opt_state, model, before)

    Args:
      opt_state: `optimizer.opt_state`, after the update.
      model: the module.
      before: the result of `snapshot` before the forward pass.

    Example:
      >>> import jax.numpy as jnp, jaxmp
      >>> model = nnx.BatchNorm(2, rngs=nnx.Rngs(0))
      >>> optimizer = Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "fp32"), wrt=nnx.Param)
      >>> before = snapshot(model)
      >>> _ = model(jnp.full((4, 2), jnp.inf))
      >>> optimizer.update(model, jax.tree.map(lambda x: x * jnp.nan, nnx.state(model, nnx.Param)))
      >>> restore_if_skipped(optimizer.opt_state, model, before)
      >>> model.mean[...].tolist()
      [0.0, 0.0]
    """
    argument_kinds.check(
        "restore_if_skipped(opt_state, model, before)",
        opt_state=("state or holder", opt_state),
        model=("not a state", model),
        before=("not a state", before),
    )
    paths = {path for path, _ in nnx.to_flat_state(before)}
    now = nnx.state(model, lambda path, _: tuple(path) in paths)
    nnx.update(model, states.keep_if_skipped(opt_state, now, before))
