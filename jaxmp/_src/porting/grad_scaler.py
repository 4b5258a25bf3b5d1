"""`GradScaler`: loss scaling as PyTorch users write it, for loops that are ported line by line.

    torch                                        here
    scaler = GradScaler()                        scaler = jaxmp.GradScaler()
    scaler.scale(loss).backward()                grads = jax.grad(lambda p: scaler.scale(loss_fn(p)))(params)
    scaler.unscale_(opt)                         grads, scaler = scaler.unscale(grads)
    clip_grad_norm_(params, 1.0)                 grads = ...any function of them, or a part of tx
    scaler.step(opt)                             params, opt_state, scaler = scaler.step(tx, grads, opt_state, params)
    scaler.update()                              scaler = scaler.update()

A scaler is immutable: what torch changes in place comes back as a new one. It is a pytree, so it goes in and out of
`jax.jit`, `lax.scan`, pmap and shard_map like params do. How far each optimizer is in its step,

    READY --unscale--> UNSCALED --step--> STEPPED           (step unscales by itself if nobody did)
      ^-----------------------update-----------------'

is part of its *structure*, not of its values. So a wrong order raises while the function is traced, and a step that
ends with `update` hands back the structure it was given: the second call compiles nothing.

New code is better off with `jaxmp.mixed_precision` and `jaxmp.value_and_grad`: there the scale lives in `opt_state`,
nothing can be called in a wrong order, and the optimizer can write in place. The two ways exclude each other: both
unscale. Masters of 16-bit params are `jaxmp.keep_master_params`, which goes with either. What only `value_and_grad`
knows is fp8 scales, and that `jax.grad` of replicated params under `jax.shard_map(check_vma=True)` sums over devices in
the dtype of the params, where float16 overflows: pass them through `jax.lax.pcast(..., to="varying")` before.

Where we differ from torch.amp.GradScaler:

- `scale` multiplies in float32 always. torch keeps the dtype of a float16 loss that has dimensions, and overflows.
- `unscale` returns float32. torch unscales in the dtype of the gradients and refuses float16.
- An overflow is looked for in the *unscaled* gradients, so one that the unscaling makes (by a scale below 1, or one
  that has sunk to 0) is found, too; and on every device, where torch's looks at its own only.
- An element of params or state that a step would make non-finite from finite gradients keeps its old value.
- The scale is there from the start; torch makes it at the first `scale`, and refuses all else before. That is checked
  as long as it is certain: not once the scaler was passed to a jitted function, which may have scaled with it.
- Gradients without a leaf are finite, as on a device that holds no params. torch raises.
- `update(new_scale)` takes an int as well, and a number must be positive and finite; so must backoff_factor lie between
  0 and 1, and growth_interval be >= 1.
- Factors multiply in float32; torch's in float64, and it rounds: for no powers of two an ulp apart at times.
- XLA flushes float32 subnormals to zero on CPU, so 1 / scale is 0 beyond 2^126; torch keeps them.
- Errors are ValueErrors and TypeErrors, not AssertionErrors and RuntimeErrors.

Reference: torch/amp/grad_scaler.py of torch 2.13.
"""

import copy
import dataclasses
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.autocast import cast_lists
from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.loss_scale import dynamic, protocol, static, torch_state
from jaxmp._src.numerics import casting
from jaxmp._src.step import buffers, mixed_precision, state, states

_UNSCALED, _STEPPED = "UNSCALED", "STEPPED"
_SAID = {_UNSCALED: "was unscaled", _STEPPED: "has stepped"}


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of all optimizers: hashable, so that they can be part of a pytree's structure.

    Attributes:
      known: (optimizer, stage), sorted, of those that are not READY.
    """

    known: tuple[tuple[str, str], ...] = ()

    def is_ready(self, optimizer: str) -> bool:
        """Whether its gradients are still scaled."""
        return optimizer not in dict(self.known)

    def unscaling(self, optimizer: str) -> "Stages":
        """The stages after the gradients of `optimizer` are unscaled; a ValueError if they are, or it has stepped."""
        if not self.is_ready(optimizer):
            raise ValueError(
                f"gradients are unscaled once, before the step; got unscale for {optimizer!r}, which "
                f"{_SAID[dict(self.known)[optimizer]]} since the last update(). Call it once, before step, and give "
                f"each optimizer a name of its own: optimizer=."
            )
        return self._with(optimizer, _UNSCALED)

    def stepping(self, optimizer: str) -> "Stages":
        """The stages after a step of `optimizer`; a ValueError if it has stepped."""
        if dict(self.known).get(optimizer) == _STEPPED:
            raise ValueError(
                f"an optimizer steps once between two updates; got step for {optimizer!r}, which has stepped since the "
                f"last update(). Call scaler = scaler.update() once at the end of a step, and give each optimizer a "
                f"name of its own: optimizer=."
            )
        return self._with(optimizer, _STEPPED)

    def _with(self, optimizer: str, stage: str) -> "Stages":
        return Stages(tuple(sorted((dict(self.known) | {optimizer: stage}).items())))


@dataclasses.dataclass(frozen=True)
class _Static:
    """What of a scaler is structure."""

    enabled: bool
    axis_name: collectives.AxisName
    stages: Stages = dataclasses.field(default_factory=Stages)


@jax.tree_util.register_pytree_with_keys_class
class GradScaler:
    """torch.amp's loss scaler as an immutable pytree; see the module's docstring.

    The scale follows torch's rule: times `backoff_factor` after a step in which any optimizer overflowed, times
    `growth_factor` after `growth_interval` steps in a row in which none did.

    Args:
      init_scale: the first scale, > 0.
      growth_factor: > 1. Powers of two keep gradients exact.
      backoff_factor: between 0 and 1, both excluded.
      growth_interval: good steps after which the scale grows, >= 1.
      enabled: False for plain training: nothing is scaled, looked at or skipped, bit for bit.
      axis_name: axes over which devices agree on overflow: `"auto"` (all that pmap or shard_map binds), names, or None.
      loss_scale: None for torch's rule with the arguments above. Or a `DynamicLossScale` with any rule (hysteresis,
        floor and ceiling), a `StaticLossScale`, or a number for that; the arguments above then stay at their defaults.

    Raises:
      ValueError: a number outside of its range; arguments of torch's rule beside `loss_scale`.
      TypeError: a loss scale of another kind.

    Example:
      >>> def loss_fn(params, x):
      ...     return jnp.mean((x @ params["w"]).astype(jnp.float32) ** 2)
      >>> tx = optax.sgd(0.1)
      >>> @jax.jit
      ... def train_step(params, opt_state, scaler, x):
      ...     grads = jax.grad(lambda p: scaler.scale(loss_fn(p, x)))(params)
      ...     params, opt_state, scaler = scaler.step(tx, grads, opt_state, params)
      ...     return params, opt_state, scaler.update()
      >>> params, scaler = {"w": jnp.ones(2)}, GradScaler(1024.0)
      >>> opt_state = tx.init(params)
      >>> for x in (jnp.ones((1, 2)), jnp.full((1, 2), jnp.inf)):
      ...     params, opt_state, scaler = train_step(params, opt_state, scaler, x)
      ...     print(params["w"], scaler.get_scale())
      [0.6 0.6] 1024.0
      [0.6 0.6] 512.0
    """

    def __init__(
        self,
        init_scale: float | Float[Array, ""] = 2.0**16,
        *,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        axis_name: collectives.AxisName = "auto",
        loss_scale: Any = None,
    ):
        cast_lists.check_no_device("GradScaler", init_scale)
        names = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self._static, self._has_scaled = _Static(bool(enabled), names), False
        self._found_inf: dict[str, Bool[Array, ""]] = {}
        if loss_scale is None:
            self._loss_scale: Any = dynamic.DynamicLossScale.preset(
                "torch",
                initial_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
            )
            return
        if (init_scale, growth_factor, backoff_factor, growth_interval) != (2.0**16, 2.0, 0.5, 2000):
            raise ValueError(
                "loss_scale= brings its own; got init_scale, factors or an interval beside it. Pass those to what it "
                "is made by, such as jaxmp.DynamicLossScale."
            )
        self._loss_scale = protocol.as_loss_scale(loss_scale)
        if not isinstance(self._loss_scale, dynamic.DynamicLossScale | static.StaticLossScale):
            raise TypeError(
                f"a GradScaler's loss_scale must be a DynamicLossScale, a StaticLossScale or a number; got "
                f"{loss_scale!r}. For no scaling pass enabled=False; for a class of your own use jaxmp.mixed_precision."
            )

    def scale(self, tree: PyTree) -> PyTree:
        """A loss, or a tree of losses, times the scale: what is to be differentiated.

        Args:
          tree: float arrays of any shape. What you log is to be kept from before: never divide a loss back.

        Returns:
          The tree in float32; `tree` itself if the scaler is not enabled.

        Raises:
          TypeError: a leaf that is no float array, named by path.

        Example:
          >>> GradScaler(4.0).scale({"a": jnp.float32(2.0)})
          {'a': Array(8., dtype=float32)}
        """
        self._has_scaled = True
        if not self.is_enabled():
            return tree
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not casting.is_float(x):
                raise TypeError(
                    f"scale multiplies losses, which must be float arrays; got "
                    f"{getattr(x, 'dtype', type(x).__name__)} at {tree_paths.path_str(path)}. Leave other "
                    f"outputs out: return scaler.scale(loss), aux."
                )
            warn_of_rounded_loss(jnp.result_type(x))
        return self._loss_scale.scale(tree)

    def unscale(self, grads: PyTree, *, optimizer: str = "optimizer") -> tuple[PyTree, "GradScaler"]:
        """The gradients of one optimizer, float32(g) / scale, to clip or look at before its `step`.

        Reduce gradients over devices before or after: an overflow on one device is known to all.

        Args:
          grads: scaled gradients, in any float dtypes. If several losses are summed up (microbatches), their sum.
          optimizer: the optimizer whose gradients these are; one name for each, where there are several.

        Returns:
          `(grads, scaler)`, float32 and one that knows whether they overflowed; both as they were if it is not enabled.

        Raises:
          ValueError: they were unscaled, or this optimizer has stepped, since the last `update`; nothing was scaled.

        Example:
          >>> scaler = GradScaler(4.0)
          >>> loss = scaler.scale(jnp.float32(1.0))
          >>> grads, scaler = scaler.unscale({"w": jnp.array([8.0, jnp.inf], jnp.float16)})
          >>> grads, bool(scaler.found_inf())
          ({'w': Array([ 2., inf], dtype=float32)}, True)
        """
        if not self.is_enabled():
            return grads, self
        self._check_scaled("unscale")
        stages = self._static.stages.unscaling(optimizer)
        with jax.named_scope("jaxmp.unscale"):
            grads = self._loss_scale.unscale(grads)
        with jax.named_scope("jaxmp.check_finite"):
            found_inf = ~collectives.all_finite(grads, self._static.axis_name)
        return grads, self._went_on(stages, optimizer, found_inf)

    def step(
        self,
        tx: optax.GradientTransformation,
        grads: PyTree,
        opt_state: Any,
        params: PyTree,
        *,
        optimizer: str = "optimizer",
        **extra_args: Any,
    ) -> tuple[PyTree, Any, "GradScaler"]:
        """One step of an optimizer, which leaves params and state alone, bit for bit, if its gradients overflowed.

        Args:
          tx: any optax transform; for 16-bit params best `jaxmp.keep_master_params(inner, policy)`, whose masters the
            params are then rounded from.
          grads: what `unscale` returned, perhaps changed since; or scaled gradients, if it was not called.
          opt_state: state of `tx`.
          params: the model's params.
          optimizer: as for `unscale`.
          **extra_args: handed to `tx.update`.

        Returns:
          `(params, opt_state, scaler)`.

        Raises:
          ValueError: this optimizer has stepped since the last `update`; nothing was scaled; `tx` unscales itself.

        Example:
          >>> scaler, params, tx = GradScaler(4.0), jnp.array([1.0]), optax.sgd(1.0)
          >>> grads = jax.grad(lambda p: scaler.scale(jnp.sum(p**2)))(params)
          >>> params, opt_state, scaler = scaler.step(tx, grads, tx.init(params), params)
          >>> params
          Array([-1.], dtype=float32)
        """
        if state.find(opt_state, states.UnscaleState):
            raise ValueError(
                "gradients are unscaled once; got a tx that does it, too (mixed_precision or unscale_and_skip). Pass "
                "inner or jaxmp.keep_master_params(inner, policy); or use jaxmp.value_and_grad instead of a GradScaler."
            )
        apply = functools.partial(mixed_precision.apply_gradients, tx, **extra_args)
        if not self.is_enabled():
            return *apply(grads, opt_state, params), self
        self._check_scaled("step")
        stages, scaler = self._static.stages.stepping(optimizer), self
        if self._static.stages.is_ready(optimizer):
            grads, scaler = self.unscale(grads, optimizer=optimizer)
        found_inf = casting.computed_once(scaler._found_inf[optimizer])
        with jax.named_scope("jaxmp.optimizer"):
            new = apply(grads, opt_state, params)
        with jax.named_scope("jaxmp.keep_or_skip"):
            keep = functools.partial(buffers.finite_or, ~found_inf)
            params, opt_state = jax.tree.map(keep, new, (params, opt_state))
        return params, opt_state, scaler._went_on(stages, optimizer, found_inf)

    def update(self, new_scale: float | Float[Array, ""] | None = None) -> "GradScaler":
        """The scaler for the next step: once per step, after every optimizer has stepped.

        Args:
          new_scale: None for the rule: the scale falls if *any* optimizer overflowed. A positive number or a scalar
            array is taken as the scale as it is; the count of good steps then stays, whatever overflowed.

        Returns:
          A scaler that is READY for every optimizer.

        Raises:
          ValueError: no gradients were unscaled since the last `update` (with `new_scale` none need be); nothing was
            scaled; a scale that is not positive, finite and of shape ().

        Example:
          >>> scaler = GradScaler(4.0)
          >>> loss = scaler.scale(jnp.float32(1.0))
          >>> _, scaler = scaler.unscale(jnp.array([jnp.nan]), optimizer="a")
          >>> _, scaler = scaler.unscale(jnp.array([1.0]), optimizer="b")
          >>> float(scaler.update().get_scale()), float(scaler.update(32.0).get_scale())
          (2.0, 32.0)
        """
        if not self.is_enabled():
            return self
        self._check_scaled("update")
        new = copy.copy(self)
        new._static, new._found_inf = dataclasses.replace(self._static, stages=Stages()), {}
        if new_scale is not None:
            new._loss_scale = torch_state.at_scale(self._loss_scale, new_scale)
            return new
        if not self._found_inf:
            raise ValueError(
                "the scale moves by what was found in gradients; got update() where none were looked at since the last "
                "one. Call scaler.step (or scaler.unscale) first, and go on with the scaler that it returns."
            )
        overflowed = functools.reduce(jnp.logical_or, self._found_inf.values())
        new._loss_scale = self._loss_scale.adjust(~overflowed)
        return new

    def get_scale(self) -> Float[Array, ""]:
        """float32[], the scale that the next loss is multiplied by; 1.0 if the scaler is not enabled.

        Example:
          >>> GradScaler().get_scale(), GradScaler(enabled=False).get_scale()
          (Array(65536., dtype=float32), Array(1., dtype=float32))
        """
        return self._loss_scale.loss_scale if self.is_enabled() else jnp.ones((), jnp.float32)

    def is_enabled(self) -> bool:
        """Whether it scales at all: a Python bool.

        Example:
          >>> GradScaler(enabled=False).is_enabled()
          False
        """
        return self._static.enabled

    def found_inf(self, *, optimizer: str = "optimizer") -> Bool[Array, ""]:
        """bool[], whether this optimizer's gradients overflowed on any device, and its step is or will be skipped.

        Known between `unscale` (or `step`) and `update`; False if the scaler is not enabled.

        Raises:
          ValueError: its gradients were not unscaled since the last `update`.

        Example:
          >>> GradScaler(enabled=False).found_inf()
          Array(False, dtype=bool)
        """
        if not self.is_enabled():
            return jnp.zeros((), bool)
        if optimizer not in self._found_inf:
            known = ", ".join(map(repr, self._found_inf)) or "none"
            raise ValueError(
                f"found_inf is known from unscale or step to update; got {optimizer!r}, known are: {known}. Ask the "
                f"scaler that unscale or step returned."
            )
        return self._found_inf[optimizer]

    def state_dict(self) -> dict[str, float | int]:
        """What torch's `state_dict` holds, as Python numbers; {} if the scaler is not enabled.

        For checkpoints that torch reads or wrote, and flax.serialization; Orbax takes the scaler itself, as any pytree.
        With a rule that has hysteresis it holds `_hysteresis_left` as well, which torch passes over.

        Raises:
          TypeError: the scale is static: torch has no such thing.

        Example:
          >>> GradScaler(8.0).state_dict()
          {'scale': 8.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
        """
        if not self.is_enabled():
            return {}
        return torch_state.to_state_dict(self._loss_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> "GradScaler":
        """A scaler with the scale, the factors and the count of a `state_dict`, of torch's or ours.

        Args:
          state_dict: as `state_dict` makes it, numbers or scalar arrays. Not looked at if the scaler is not enabled.

        Raises:
          ValueError: an empty dict, from a scaler that was not enabled; a key that is missing; a factor out of range.
          TypeError: the scale is static.

        Example:
          >>> saved = GradScaler(8.0, growth_interval=100).state_dict()
          >>> GradScaler().load_state_dict(saved).get_scale()
          Array(8., dtype=float32)
        """
        if not self.is_enabled():
            return self
        new = copy.copy(self)
        new._loss_scale = torch_state.from_state_dict(self._loss_scale, state_dict)
        return new

    def _went_on(self, stages: Stages, optimizer: str, found_inf: Bool[Array, ""]) -> "GradScaler":
        new = copy.copy(self)
        new._static = dataclasses.replace(self._static, stages=stages)
        new._found_inf = self._found_inf | {optimizer: found_inf}
        return new

    def _check_scaled(self, what: str) -> None:
        if not self._has_scaled:
            raise ValueError(
                f"gradients are divided by a scale that the loss was multiplied by; got {what} of a GradScaler whose "
                f"scale was never called. Differentiate lambda p: scaler.scale(loss_fn(p))."
            )

    def __repr__(self) -> str:
        return f"GradScaler({self._loss_scale!r}, enabled={self.is_enabled()}, {self._static.stages!r})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], _Static]:
        self._has_scaled = True  # whoever gets the parts may scale with them
        key = jax.tree_util.GetAttrKey
        return ((key("loss_scale"), self._loss_scale), (key("found_inf"), self._found_inf)), self._static

    @classmethod
    def tree_unflatten(cls, aux: _Static, children: tuple[Any, ...]) -> "GradScaler":
        new = object.__new__(cls)
        new._static, new._has_scaled = aux, True
        new._loss_scale, new._found_inf = children
        return new


def warn_of_rounded_loss(dtype: np.dtype) -> None:
    """Warns if a loss that is to be scaled was rounded to 16 bits before."""
    if dtype.itemsize == 2:
        warnings.warn(
            f"the loss to be scaled is {dtype.name}: it was rounded, and its gradient starts in 16 bits. Compute it in "
            f"float32. `with jaxmp.autocast(...)` round a plain function reaches only the modules in it; make the "
            f"function autocast: jaxmp.autocast(loss_fn).",
            stacklevel=3,
        )
