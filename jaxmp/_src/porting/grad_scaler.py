"""`GradScaler`: loss scaling as PyTorch users write it, for loops that are ported line by line.

    torch                                        here
    scaler = GradScaler()                        scaler = jaxmp.GradScaler()
    scaler.scale(loss).backward()                grads = jax.grad(lambda p: scaler.scale(loss_fn(p)))(params)
    scaler.unscale_(opt)                         grads, scaler = scaler.unscale(grads)
    clip_grad_norm_(params, 1.0)                 grads = ...any function of them, or a part of tx
    scaler.step(opt)                             params, opt_state, scaler = scaler.step(tx, grads, opt_state, params)
    scaler.update()                              scaler = scaler.update()

A scaler is immutable: a method that changes a torch scaler in place returns a new scaler here. It is a pytree, so it
can be an argument and a result of `jax.jit`, `lax.scan`, pmap and shard_map, as params can. Each optimizer is in one of
three stages:

    READY --unscale--> UNSCALED --step--> STEPPED           (without unscale, step unscales the gradients itself)
      ^-----------------------update-----------------'

The stages are part of the pytree's *structure*, not of its values. So a call in the wrong order raises while jax traces
the function. A step that ends with `update` returns the structure that it got, so the second call compiles nothing.

New code should use `jaxmp.mixed_precision` and `jaxmp.value_and_grad`: there `opt_state` holds the scale, no call can
be in the wrong order, and the optimizer can write in place. Do not combine the two ways: both unscale.
`jaxmp.keep_master_params`, the float32 masters of 16-bit params, works with both. Only `value_and_grad` handles two
cases: fp8 scales; and replicated params under `jax.shard_map(check_vma=True)`, where `jax.grad` sums gradients over
devices in the dtype of the params, and a float16 sum can overflow. With a GradScaler, pass such params through
`jax.lax.pcast(..., to="varying")` first.

Where it differs from torch.amp.GradScaler: docs/how-to/job/from_torch_amp.md, "Names".

Reference: torch/amp/grad_scaler.py of torch 2.13.
"""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, PyTree

from jaxmp._src.autocast import cast_lists
from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import collectives
from jaxmp._src.loss_scale import dynamic, protocol, static, torch_state
from jaxmp._src.numerics import casting, reductions
from jaxmp._src.step import scale_reads, state as states, transform
from jaxmp._src.step.transform import Transformation
from pallas_kernels.when import when

# Methods of torch's scaler that are missing here, and what to write.
_IN_PLACE = {
    "unscale_": "`grads, scaler = scaler.unscale(grads)`",
    **dict.fromkeys(
        ("set_growth_factor", "set_backoff_factor", "set_growth_interval"),
        "scaler = scaler.load_state_dict(scaler.state_dict() | {'growth_interval': 1000})",
    ),
}

_READY, _UNSCALED, _STEPPED = "READY", "UNSCALED", "STEPPED"
_LEAST, _LARGEST = float(jnp.finfo(jnp.float32).smallest_normal), float(jnp.finfo(jnp.float32).max)  # of a scale


@dataclasses.dataclass(frozen=True)
class _Structure:
    """The static part of a scaler: its settings, and the stage of each optimizer."""

    enabled: bool
    axis_name: collectives.AxisName
    stages: tuple[tuple[str, str], ...] = ()  # (optimizer, stage), sorted; optimizers that are READY are left out

    def stage_of(self, optimizer: str) -> str:
        return dict(self.stages).get(optimizer, _READY)

    def after_unscale(self, optimizer: str) -> "_Structure":
        stage = self.stage_of(optimizer)
        if stage != _READY:
            done = "was already unscaled" if stage == _UNSCALED else "has already stepped"
            raise ValueError(
                f"unscale must come once, before step; got {optimizer!r}, which {done} since the last update(). Name "
                f"several optimizers by optimizer=."
            )
        return self._with(optimizer, _UNSCALED)

    def after_step(self, optimizer: str) -> "_Structure":
        if self.stage_of(optimizer) == _STEPPED:
            raise ValueError(
                f"an optimizer must step once between two updates; got {optimizer!r} twice. Call scaler = "
                f"scaler.update(), or name several optimizers by optimizer=."
            )
        return self._with(optimizer, _STEPPED)

    def after_update(self) -> "_Structure":
        return dataclasses.replace(self, stages=())

    def _with(self, optimizer: str, stage: str) -> "_Structure":
        return dataclasses.replace(self, stages=tuple(sorted((dict(self.stages) | {optimizer: stage}).items())))


@jax.tree_util.register_pytree_with_keys_class
class GradScaler:
    """torch.amp's loss scaler as an immutable pytree.

    The scale follows torch's rule: after a step in which any optimizer overflowed, it is multiplied by
    `backoff_factor`; after `growth_interval` steps in a row without overflow, by `growth_factor`.

    Args:
      init_scale: the first scale, > 0.
      growth_factor: > 1. Powers of two keep gradients exact.
      backoff_factor: between 0 and 1, both excluded.
      growth_interval: steps without overflow after which the scale grows, >= 1.
      enabled: False turns the scaler off: it scales, checks and skips nothing, and training has the same bits as
        without it.
      axis_name: axes over which devices agree on overflow: `"auto"` (all axes that pmap or shard_map binds), names, or
        None.
      loss_scale: None for torch's rule with the arguments above. Or a `DynamicLossScale` with any rule (hysteresis,
        lower and upper bound), a `StaticLossScale`, or a number (a static scale). Then do not pass the arguments above.

      **torch_options: none; torch's `device=` gets an error that says what to do.

    Raises:
      ValueError: a number is outside its range, or arguments of torch's rule are passed beside `loss_scale`.
      TypeError: `loss_scale` is another object; a device was given.

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
        **torch_options: Any,
    ):
        for option, value in torch_options.items():
            if option != "device":
                raise TypeError(f"GradScaler() got an unexpected keyword argument {option!r}")
            raise TypeError(f"GradScaler takes no device; got {value!r}. Leave it out.")
        cast_lists.check_no_device("GradScaler", init_scale)
        names = tuple(axis_name) if isinstance(axis_name, list) else axis_name
        self._structure = _Structure(bool(enabled), names)
        self._may_have_scaled = False  # whether `scale` was called, or may have been where this object cannot see it
        self._found_inf: dict[str, Bool[Array, ""]] = {}  # by optimizer, from unscale or step until update
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
                "loss_scale= must stand alone; got init_scale, a factor or an interval too. Pass them to "
                "jaxmp.DynamicLossScale."
            )
        self._loss_scale = protocol.as_loss_scale(loss_scale)
        if not isinstance(self._loss_scale, dynamic.DynamicLossScale | static.StaticLossScale):
            raise TypeError(
                f"loss_scale must be a DynamicLossScale, a StaticLossScale or a number; got {loss_scale!r}. For no "
                f"scaling pass enabled=False."
            )

    def scale(self, tree: PyTree) -> PyTree:
        """A loss, or a tree of losses, times the scale. Differentiate the result.

        Args:
          tree: float arrays of any shape. To log a loss, keep it from before this call; do not divide the result.

        Returns:
          The tree in float32; `tree` itself if the scaler is not enabled.

        Raises:
          TypeError: a leaf is not a float array; the message names its path.

        Example:
          >>> GradScaler(4.0).scale({"a": jnp.float32(2.0)})
          {'a': Array(8., dtype=float32)}
        """
        self._may_have_scaled = True
        scale_reads.note_read(self.get_scale())
        if not self.is_enabled():
            return tree
        for path, x in jax.tree_util.tree_leaves_with_path(tree):
            if not casting.is_float(x):
                raise TypeError(
                    f"scale takes losses, which are float arrays; got {getattr(x, 'dtype', type(x).__name__)} at "
                    f"{tree_paths.path_str(path)}. Write return scaler.scale(loss), aux."
                )
            _warn_if_rounded(jnp.result_type(x))
        return self._loss_scale.scale(tree)

    def unscale(self, grads: PyTree, *, optimizer: str = "optimizer") -> tuple[PyTree, "GradScaler"]:
        """The gradients of one optimizer, float32(g) / scale, to clip or inspect before its `step`.

        You can reduce gradients over devices before or after this call: every device learns of an overflow on any.

        Args:
          grads: scaled gradients, in any float dtypes. For microbatches, pass the sum of their gradients.
          optimizer: a name for the optimizer of these gradients. With several optimizers, give each its own name.

        Returns:
          `(grads, scaler)`: the gradients in float32, and a scaler that knows whether they overflowed. If the scaler is
          not enabled, both are unchanged.

        Raises:
          ValueError: since the last `update`, these gradients were already unscaled or this optimizer has stepped; they
            are gradients that `unscale` returned, and the scaler is one from before; or `scale` was never called.
          TypeError: `grads` is an optimizer.

        Example:
          >>> scaler = GradScaler(4.0)
          >>> loss = scaler.scale(jnp.float32(1.0))
          >>> grads, scaler = scaler.unscale({"w": jnp.array([8.0, jnp.inf], jnp.float16)})
          >>> grads, bool(scaler.found_inf())
          ({'w': Array([ 2., inf], dtype=float32)}, True)
        """
        if isinstance(grads, optax.GradientTransformation):
            raise TypeError(
                "unscale takes the gradients; got an optimizer. Write `grads, scaler = scaler.unscale(grads)`."
            )
        if not self.is_enabled():
            return grads, self
        self._check_scaled("unscale")
        structure = self._structure.after_unscale(optimizer)
        scale_reads.check_not_unscaled(grads, self.get_scale())
        with jax.named_scope("jaxmp.unscale"):
            grads = self._loss_scale.unscale(grads)
        with jax.named_scope("jaxmp.check_finite"):
            found_inf = ~collectives.all_finite(grads, self._structure.axis_name)
        scale_reads.note_unscaled(grads, self.get_scale())
        return grads, self._at(structure, self._found_inf | {optimizer: found_inf})

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
        """One step of an optimizer. If its gradients overflowed, params and state keep every bit.

        Args:
          tx: any optax transform. For 16-bit params, use `jaxmp.keep_master_params(inner, policy)`: the params are then
            rounded from float32 masters.
          grads: the gradients that `unscale` returned, changed or not; or scaled gradients, if you did not call it.
          opt_state: state of `tx`.
          params: the model's params.
          optimizer: as for `unscale`.
          **extra_args: passed on to `tx.update`.

        Returns:
          `(params, opt_state, scaler)`.

        Raises:
          ValueError: this optimizer has already stepped since the last `update`; `scale` was never called; `tx`
            unscales itself; or the gradients are unscaled, and the scaler is one from before.

        Example:
          >>> scaler, params, tx = GradScaler(4.0), jnp.array([1.0]), optax.sgd(1.0)
          >>> grads = jax.grad(lambda p: scaler.scale(jnp.sum(p**2)))(params)
          >>> params, opt_state, scaler = scaler.step(tx, grads, tx.init(params), params)
          >>> params
          Array([-1.], dtype=float32)
        """
        if states.has_loss_scale(opt_state):
            raise ValueError(
                "gradients must be unscaled once; got a tx that also unscales. Pass jaxmp.keep_master_params(inner, "
                "policy)."
            )
        apply = functools.partial(transform.apply_gradients, tx, **extra_args)
        if not self.is_enabled():
            return *apply(grads, opt_state, params), self
        self._check_scaled("step")
        structure, scaler = self._structure.after_step(optimizer), self
        if self._structure.stage_of(optimizer) == _READY:
            grads, scaler = self.unscale(grads, optimizer=optimizer)
        found_inf = scaler._found_inf[optimizer]
        taken = reductions.computed_once(~found_inf)
        if isinstance(tx, Transformation):
            params, opt_state = apply(grads, opt_state, params, grads_finite=taken)
        else:
            params, opt_state = when(
                taken, lambda params, opt_state: apply(grads, opt_state, params), params, opt_state
            )
        return params, opt_state, scaler._at(structure, scaler._found_inf | {optimizer: found_inf})

    def update(self, new_scale: float | Float[Array, ""] | None = None) -> "GradScaler":
        """The scaler for the next step. Call it once per step, after every optimizer has stepped.

        Args:
          new_scale: None for the rule: the scale falls if *any* optimizer overflowed. Or a positive number or a scalar
            array, the new scale; the count of steps without overflow then stays. Inside jit, where an array cannot be
            refused, one that is not positive and finite leaves the scale as it is.

        Returns:
          A scaler that is READY for every optimizer.

        Raises:
          ValueError: no gradients were unscaled since the last `update` and `new_scale` is None; `scale` was never
            called; or `new_scale` is not positive, finite and of shape ().

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
        new = self._at(self._structure.after_update(), {})
        if new_scale is not None:
            if jnp.shape(new_scale) != ():
                raise ValueError(
                    f"a loss scale must be a scalar; got new_scale of shape {jnp.shape(new_scale)}. Pass "
                    f"a number, such as new_scale[0]."
                )
            if not isinstance(new_scale, Tracer) and not _LEAST <= float(np.asarray(new_scale)) <= _LARGEST:
                raise ValueError(
                    f"a loss scale must be positive and finite; got new_scale={new_scale}. Pass one such as 2.0**16."
                )
            wanted, new._loss_scale = jax.lax.convert_element_type(new_scale, jnp.float32), copy.copy(self._loss_scale)
            new._loss_scale.loss_scale = jnp.where((wanted > 0) & (wanted < jnp.inf), wanted, self.get_scale())
            return new
        if not self._found_inf:
            raise ValueError(
                "update must come after scaler.step; got no gradients since the last update(). Use the scaler that "
                "step returned."
            )
        overflowed = functools.reduce(jnp.logical_or, self._found_inf.values())
        new._loss_scale = self._loss_scale.adjust(~overflowed)
        return new

    def get_scale(self) -> Float[Array, ""]:
        """float32[], the scale for the next loss; 1.0 if the scaler is not enabled.

        Example:
          >>> GradScaler().get_scale(), GradScaler(enabled=False).get_scale()
          (Array(65536., dtype=float32), Array(1., dtype=float32))
        """
        return self._loss_scale.loss_scale if self.is_enabled() else jnp.ones((), jnp.float32)

    def is_enabled(self) -> bool:
        """Whether the scaler scales at all: a Python bool.

        Example:
          >>> GradScaler(enabled=False).is_enabled()
          False
        """
        return self._structure.enabled

    def found_inf(self, *, optimizer: str = "optimizer") -> Bool[Array, ""]:
        """bool[], whether this optimizer's gradients overflowed on any device, so that its step is skipped.

        It is known between `unscale` (or `step`) and `update`. It is False if the scaler is not enabled.

        Args:
          optimizer: as for `unscale`.

        Raises:
          ValueError: the gradients of this optimizer were not unscaled since the last `update`.

        Example:
          >>> GradScaler(enabled=False).found_inf()
          Array(False, dtype=bool)
        """
        if not self.is_enabled():
            return jnp.zeros((), bool)
        if optimizer not in self._found_inf:
            known = ", ".join(map(repr, self._found_inf)) or "none"
            raise ValueError(
                f"found_inf is known after unscale or step; got {optimizer!r}, known are: {known}. Call it on the "
                f"scaler that they returned."
            )
        return self._found_inf[optimizer]

    def state_dict(self) -> dict[str, float | int]:
        """The entries of torch's `state_dict`, as Python numbers; {} if the scaler is not enabled.

        Use it for checkpoints of torch and for flax.serialization. Orbax saves the scaler itself, as any pytree. If the
        rule has hysteresis, the dict also has `_hysteresis_left`, which torch ignores.

        Raises:
          TypeError: the scale is static; torch has no static scale.

        Example:
          >>> GradScaler(8.0).state_dict()
          {'scale': 8.0, 'growth_factor': 2.0, 'backoff_factor': 0.5, 'growth_interval': 2000, '_growth_tracker': 0}
        """
        if not self.is_enabled():
            return {}
        return torch_state.to_state_dict(self._loss_scale)

    def load_state_dict(self, state_dict: dict[str, Any]) -> "GradScaler":
        """A scaler with the scale, the factors and the count of a `state_dict` of torch or jaxmp.

        Args:
          state_dict: numbers or scalar arrays, as `state_dict` returns them. A scaler that is not enabled ignores it.

        Raises:
          ValueError: the dict is empty (its scaler was not enabled), a key is missing, or a factor is out of range.
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

    def _at(self, structure: _Structure, found_inf: dict[str, Bool[Array, ""]]) -> "GradScaler":
        new = copy.copy(self)
        new._structure, new._found_inf = structure, found_inf
        return new

    def _check_scaled(self, method: str) -> None:
        if not self._may_have_scaled:
            raise ValueError(
                f"scale must be called before {method}; got a scaler without a call. Differentiate lambda p: "
                f"scaler.scale(loss_fn(p))."
            )

    def __getattr__(self, name: str) -> Any:
        if name in _IN_PLACE:
            raise AttributeError(f"a GradScaler is immutable, so it has no {name}. Write {_IN_PLACE[name]}.")
        raise AttributeError(f"'GradScaler' object has no attribute {name!r}")

    def __repr__(self) -> str:
        return f"GradScaler({self._loss_scale!r}, enabled={self.is_enabled()}, stages={dict(self._structure.stages)})"

    def tree_flatten_with_keys(self) -> tuple[tuple[tuple[Any, Any], ...], _Structure]:
        self._may_have_scaled = True  # a jitted function that gets these leaves may call `scale`
        key = jax.tree_util.GetAttrKey
        return ((key("loss_scale"), self._loss_scale), (key("found_inf"), self._found_inf)), self._structure

    @classmethod
    def tree_unflatten(cls, aux: _Structure, children: tuple[Any, ...]) -> "GradScaler":
        new = object.__new__(cls)
        new._structure, new._may_have_scaled = aux, True
        new._loss_scale, new._found_inf = children
        return new


def _warn_if_rounded(loss_dtype: np.dtype) -> None:
    """Warns if a loss was rounded to 16 bits before it is scaled."""
    if loss_dtype.itemsize == 2:
        warn(
            "16-bit-loss",
            f"the loss to scale is {loss_dtype.name}: it was rounded. Compute it in float32, or in "
            f"jaxmp.autocast(loss_fn).",
        )
