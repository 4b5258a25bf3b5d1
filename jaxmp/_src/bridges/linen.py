"""flax.linen: fp8 layers, and a TrainState whose step goes through `jaxmp.apply_gradients`.

`Fp8DotGeneral` is for the `dot_general_cls=` of flax's layers; `jaxmp.fp8.autocast` puts it into an unchanged model.

flax's own TrainState works with `mixed_precision` too. jaxmp's TrainState writes 16-bit params directly, passes extra
arguments to the optimizer, and does not change batch_stats and `step` in a skipped step.
"""

import dataclasses
import difflib
import inspect
from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar

import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax import struct
from flax.training import train_state
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.bridges import policy_argument
from jaxmp._src.numerics import casting
from jaxmp._src.step import (
    argument_kinds,
    policy as policy_lib,
    reload_masters,
    scale_reads,
    state as states,
    transform,
)
from jaxmp._src.step.calibrate import calibrate

T = TypeVar("T")


class _Replaced:
    """Gives a TrainState and its subclasses `replace`, which flax writes into each of them anew."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        setattr(cls, "replace", _replace)  # noqa: B010, as pyright knows the replace of flax


def _replace(self: Any, **updates: Any) -> Any:
    """As flax's. It warns of params that come without their masters: `reload` makes these, too."""
    if "params" in updates and "opt_state" not in updates:
        new, old = jax.tree.leaves(updates["params"]), jax.tree.leaves(self.params)
        masters = [state.master_params for state in states.with_masters(self.opt_state)]
        are_arrays = bool(new) and all(isinstance(x, jax.Array | np.ndarray) for x in (*new, *jax.tree.leaves(masters)))
        if are_arrays and jax.tree.leaves(masters) and any(x is not y for x, y in zip(new, old, strict=False)):
            warn(
                "params-without-masters",
                "params= must come with their masters; got params alone, which the next step computes from the old "
                "masters. To train on, call state.reload(params). To evaluate, pass opt_state=state.opt_state.",
            )
    return dataclasses.replace(self, **updates)


class _Read(Generic[T]):
    """A property that a field of a subclass may replace, such as the `metrics` of flax's own examples.

    A class with such a field does not show it, or dataclasses would take it for the field's default.
    """

    def __init__(self, read: Callable[[Any], T]):
        self.__doc__, self._read = read.__doc__, read

    def __get__(self, state: Any, cls: type) -> T:
        if state is not None:
            return self._read(state)
        name = self._read.__name__
        if any(name in inspect.get_annotations(c) for c in cls.__mro__):
            raise AttributeError(f"the field {name} of {cls.__name__} has no default")
        return self  # pyright: ignore[reportReturnType]


_OF_OPTAX = {"value", "grad", "value_fn", "loss", "key"}  # usual names of extra arguments, whatever a field is called


class TrainState(_Replaced, train_state.TrainState):
    """flax's TrainState for a `mixed_precision` optimizer.

    It carries its policy: `jaxmp.value_and_grad(loss_fn)(state.params, ..., opt_state=state.opt_state)` runs the loss
    in the policy's precision, as with `policy=`. (Any `with jaxmp.autocast(...)` around that call, or in the loss, has
    precedence; another `policy=` is an error.)

    Attributes:
      policy: the policy of the optimizer, static; None: the loss runs as it is written.

    Example:
      >>> import flax.linen as nn, jax.numpy as jnp, jaxmp
      >>> model = nn.Dense(2)
      >>> params32 = model.init(jax.random.key(0), jnp.ones((1, 3)))["params"]
      >>> train_state = TrainState.create(
      ...     apply_fn=model.apply, params=params32, tx=optax.adam(1e-3), policy="fp16")
      >>> def loss_fn(params, x):
      ...     return jnp.mean(model.apply({"params": params}, x) ** 2)
      >>> x = jnp.ones((4, 3))
      >>> loss, grads = jaxmp.value_and_grad(loss_fn)(train_state.params, x, opt_state=train_state.opt_state)
      >>> train_state = train_state.apply_gradients(grads=grads)
      >>> train_state.params["kernel"].dtype.name, int(train_state.step)
      ('float16', 1)
    """

    policy: policy_lib.Policy | None = struct.field(pytree_node=False, default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.policy is not None:
            if not isinstance(self.policy, policy_lib.Policy):
                raise TypeError(
                    f"a TrainState keeps the policy that create gave it; got {self.policy!r}. Create another one from "
                    f"params=state.master_params."
                )
            object.__setattr__(self, "opt_state", states.with_policy(self.opt_state, self.policy))

    @classmethod
    def create(
        cls,
        *,
        apply_fn: Any,
        params: PyTree,
        tx: optax.GradientTransformation,
        policy: str | jmp.Policy | None = None,
        keep_fp32: Any = None,
        loss_scale: Any = "auto",
        **kwargs: Any,
    ) -> Self:
        """As flax's. With `policy`, `params` may be float32: masters start from them, and the model gets cast params.

            TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(3e-3), policy="bf16")

        Args:
          apply_fn: the model's `apply`.
          params: float32 params (with `policy`), or params cast by the policy of `tx`.
          tx: the optimizer of optax, which becomes `jaxmp.mixed_precision(tx, policy)`; or one of jaxmp.
          policy: the policy, or its name; of a `tx` of jaxmp, the one that it was made with. The state carries it.
          keep_fp32: as for `get_policy`, with a `tx` of optax.
          loss_scale: as for `mixed_precision`, with a `tx` of optax.
          **kwargs: fields of subclasses, such as `batch_stats`.

        Raises:
          TypeError: arguments in the place of others; `keep_fp32` or `loss_scale` with a `tx` of jaxmp.
          ValueError: `policy` with a `tx` of jaxmp that keeps no masters, or that was made with another policy.
        """
        argument_kinds.check(
            "TrainState.create(apply_fn=model.apply, params=params, tx=tx, policy=policy)",
            params=("params", params),
            tx=("optimizer", tx),
            policy=("policy", policy),
        )
        tx, policy = policy_argument.wrapped(tx, policy, keep_fp32, loss_scale)
        opt_state = tx.init(params)
        if policy is not None:
            params = policy.cast_to_param(params)
        step = jax.numpy.zeros((), jax.numpy.int32)
        return cls(step=step, apply_fn=apply_fn, params=params, tx=tx, opt_state=opt_state, policy=policy, **kwargs)

    def apply_gradients(self, *, grads: PyTree, **kwargs: Any) -> Self:
        """One step. A skipped step changes only the loss scale and the skip counters.

        Args:
          grads: scaled gradients, reduced over devices.
          **kwargs: fields of this state (`batch_stats=new_stats`), which are replaced unless the step is skipped; other
            arguments go to `tx.update` (`value=loss` for `optax.contrib.reduce_on_plateau`).

        Returns:
          The next state.

        Raises:
          TypeError: an argument whose name is nearly that of a field.
        """
        known = {field.name for field in dataclasses.fields(self)}
        fields = {name: value for name, value in kwargs.items() if name in known}
        extra = {name: value for name, value in kwargs.items() if name not in known}
        for name in extra.keys() - _OF_OPTAX:
            if field := difflib.get_close_matches(name, known, 1, 0.8):
                raise TypeError(f"apply_gradients takes fields of the state; got {name}, for {field[0]}.")
        if self.policy is not None:
            policy_argument.check_taken(self.policy, self.opt_state, grads, self.params)
        params, opt_state = transform.apply_gradients(self.tx, grads, self.opt_state, self.params, **extra)
        fields["step"] = fields.get("step", self.step + 1)
        old = {name: getattr(self, name) for name in fields}
        return self.replace(params=params, opt_state=opt_state, **states.keep_if_skipped(opt_state, fields, old))

    def reload(self, params: PyTree) -> Self:
        """This state with other params, from which it trains on: loaded, clipped, averaged. The rest stays.

        Masters are made from the new params, with full precision where these are float32. Where a new param has the
        dtype and the value of the old one, its master keeps all its bits. Params and masters lie on the devices as the
        old ones do. (The new masters are four bytes per parameter, for as long as both states live.)

        Args:
          params: in float32, or as the policy casts them; other containers (a FrozenDict) become those of the old.

        Raises:
          ValueError: params with other leaves, shapes or kinds of numbers than those of this state, named by path.

        Example:
          >>> import jax.numpy as jnp, jaxmp
          >>> state = TrainState.create(apply_fn=None, params={"w": jnp.ones(1)}, tx=optax.sgd(0.1), policy="bf16")
          >>> state.reload({"w": jnp.array([0.3])}).params
          {'w': Array([0.300781], dtype=bfloat16)}
        """
        new, old = (tree_paths.leaves_by_path(tree) for tree in (params, self.params))
        reload_masters.check_fits(new, old, "reload")
        whole = jax.tree.unflatten(jax.tree.structure(self.params), [new[path] for path in old])
        opt_state = self.opt_state
        if states.with_masters(opt_state):
            opt_state = reload_masters.reload_master_params(opt_state, whole, before=self.params)
        cast = whole if self.policy is None else self.policy.cast_to_param(whole)

        def as_old(x: Any, old: Any) -> Any:
            return reload_masters.placed(casting.cast_float(jnp.asarray(x), old.dtype, saturate=True), old)

        cast = jax.tree.map(as_old, cast, self.params)
        return self.replace(params=cast, opt_state=opt_state)

    def calibrate(self, fun: Any, *args: Any, **kwargs: Any) -> Self:
        """This state with fp8 scales and amax histories from one batch; see `jaxmp.fp8.calibrate`.

        Args:
          fun: the loss, called as `fun(params, *args)`.
          *args: its arguments behind the params.
          **kwargs: as for `jaxmp.fp8.calibrate`: `has_aux`, `policy`, `accumulate`, ..., and arguments of `fun`.
        """
        params, opt_state = calibrate(fun, self.params, *args, tx=self.tx, opt_state=self.opt_state, **kwargs)
        return self.replace(params=params, opt_state=opt_state)

    @_Read
    def master_params(self) -> PyTree:
        """The params in float32, `jaxmp.get_master_params` of this state: for averages, targets, teachers and export.

        An average of 16-bit params stalls: a small step of it is rounded to nothing.

        Example:
          >>> import jax.numpy as jnp
          >>> params32 = {"w": jnp.array([0.3])}
          >>> state = TrainState.create(apply_fn=None, params=params32, tx=optax.sgd(0.1), policy="bf16")
          >>> state.params, state.master_params
          ({'w': Array([0.300781], dtype=bfloat16)}, {'w': Array([0.3], dtype=float32)})
        """
        return states.get_master_params(self.opt_state, self.params)

    @_Read
    def loss_scale(self) -> Float[Array, ""]:
        """float32[], the scale of the next loss."""
        return scale_reads.get_loss_scale(self.opt_state)

    @_Read
    def metrics(self) -> dict[str, Array]:
        """`jaxmp.get_metrics` of this state."""
        return states.get_metrics(self.opt_state)
