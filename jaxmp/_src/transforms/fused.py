"""Fused optimizers, one pass over memory: optax's AdamW, Lion and SGD, for use inside `mixed_precision`.

    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-3, max_norm=1.0), "fp16")
    params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)

With `apply_gradients`, one pass unscales and clips the gradients, updates masters and moments, and writes the model's
params. It takes a few kernel launches for any number of leaves (`pallas_kernels.update`), on NVIDIA GPUs from Hopper
on, with jax >= 0.11.2. All arrays are updated in place. In a skipped step this pass reads and writes nothing.

On other devices, and where several share the arrays under plain `jax.jit`, XLA computes the same, in as many bytes and
more launches. With `tx.update` optax's own optimizer runs. All have the same state, so a run may switch between them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.step import masters, optimizers
from jaxmp._src.step.state import GlobalNormState, find
from jaxmp._src.transforms import clip, compress
from pallas_kernels import backend as kernel_backend, update as kernels
from pallas_kernels.moments import is_quantized

Mask = PyTree | Callable[[PyTree], PyTree] | None


def fused_adamw(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    eps_root: float = 0.0,
    *,
    weight_decay: float = 1e-4,
    mask: Mask = None,
    nesterov: bool = False,
    max_norm: float | None = None,
    state_dtype: Any = "float32",
    backend: str = "auto",
) -> optax.GradientTransformationExtraArgs:
    """`optax.adamw` with clipping, as a fused multi-tensor update; with `nesterov`, `optax.nadamw`.

        m <- b1 m + (1 - b1) g,   v <- b2 v + (1 - b2) g^2
        w <- w - lr (m_hat / (sqrt(v / (1 - b2^t) + eps_root) + eps) + weight_decay w)

        m_hat = m / (1 - b1^t)
        nesterov: m_hat = b1 m / (1 - b1^(t + 1)) + (1 - b1) g / (1 - b1^t)

    With `jaxmp.apply_gradients`, on NVIDIA GPUs from Hopper on, one pass over memory (a few kernel launches) unscales
    and clips the gradients, updates masters and moments, and writes the model's params. On other devices, and where
    several share the arrays under plain `jax.jit`, XLA computes the same. With `tx.update` optax's own optimizer runs.
    All have the same state.

    Args:
      learning_rate: a number, a scalar, or a schedule.
      b1, b2, eps, eps_root: as for `optax.adamw`.
      weight_decay: the decoupled weight decay.
      mask: tree of bools like the params (or a function of them): True for leaves with weight decay.
      nesterov: Nesterov's momentum, as for `optax.adamw`.
      max_norm: the largest global norm of the gradients, as for `jaxmp.clip_by_global_norm`; None or 0: no clipping.
      state_dtype: the stored dtype of moments: float32, bfloat16, int8 (companded blocks), float8_e4m3fn, float8_e5m2;
        see `compress_moments`.
      backend: "auto" (kernels if they can run, else XLA), "xla", "mosaic" or "interpret". A named backend that cannot
        run raises at `apply_gradients` and says why.

    Returns:
      An optax transform. Its results equal those of `optax.adamw` within the rounding of float32.

    Raises:
      ValueError: another `state_dtype`; a negative `max_norm`; a schedule for `weight_decay`; in a step, a state whose
        moments are stored in another dtype.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(fused_adamw(1e-3, max_norm=1.0), "bf16")
      >>> opt_state, params = tx.init({"w": jnp.ones(2)}), {"w": jnp.ones(2, jnp.bfloat16)}
      >>> params, opt_state = jaxmp.apply_gradients(tx, {"w": jnp.ones(2, jnp.bfloat16)}, opt_state, params)
      >>> float(optax.tree.get(opt_state, "grad_norm"))
      1.4142135381698608

    References:
      Loshchilov and Hutter 2019 (arXiv 1711.05101); Dozat 2016 (NAdam, ICLR workshop);
      torch.optim.AdamW(fused=True), apex's FusedAdam.
    """
    plain = optax.adamw(learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay, mask=mask, nesterov=nesterov)

    def scalars(state: Any) -> tuple[Any, ...]:
        (adam,) = find(state, optax.ScaleByAdamState)
        count = optax.safe_increment(adam.count)
        next_one = (1 - b1 ** optax.safe_increment(count),) if nesterov else ()
        return 1 - b1**count, 1 - b2**count, *next_one

    rule = kernels.AdamW(b1, b2, eps, eps_root, nesterov)
    fields = {optax.ScaleByAdamState: ("mu", "nu")}
    return _fused(plain, rule, fields, learning_rate, scalars, weight_decay, mask, max_norm, state_dtype, backend)


def fused_lion(
    learning_rate: optax.ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    *,
    weight_decay: float = 1e-3,
    mask: Mask = None,
    max_norm: float | None = None,
    state_dtype: Any = "float32",
    backend: str = "auto",
) -> optax.GradientTransformationExtraArgs:
    """`optax.lion` with clipping, as a fused multi-tensor update; arguments as for `fused_adamw`.

        w <- w - lr (sign(b1 m + (1 - b1) g) + weight_decay w),   m <- b2 m + (1 - b2) g

    Returns:
      An optax transform. Its results equal those of `optax.lion` within the rounding of float32.

    Raises:
      ValueError: as for `fused_adamw`.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(fused_lion(0.5, weight_decay=0.0), "bf16")
      >>> opt_state, params = tx.init(jnp.ones(2)), jnp.ones(2, jnp.bfloat16)
      >>> jaxmp.apply_gradients(tx, jnp.array([3.0, -3.0], jnp.bfloat16), opt_state, params)[0]
      Array([0.5, 1.5], dtype=bfloat16)

    References:
      Chen et al. 2023, "Symbolic discovery of optimization algorithms" (arXiv 2302.06675).
    """
    plain = optax.lion(learning_rate, b1, b2, weight_decay=weight_decay, mask=mask)
    rule, fields = kernels.Lion(b1, b2), {optax.ScaleByLionState: ("mu",)}
    return _fused(plain, rule, fields, learning_rate, _no_scalars, weight_decay, mask, max_norm, state_dtype, backend)


def fused_sgd(
    learning_rate: optax.ScalarOrSchedule,
    momentum: float = 0.9,
    nesterov: bool = False,
    *,
    max_norm: float | None = None,
    state_dtype: Any = "float32",
    backend: str = "auto",
) -> optax.GradientTransformationExtraArgs:
    """`optax.sgd` with momentum and clipping, as a fused multi-tensor update; arguments as for `fused_adamw`.

        m <- momentum m + g,   w <- w - lr m        (nesterov: w <- w - lr (momentum m + g))

    Returns:
      An optax transform. Its results equal those of `optax.sgd` within the rounding of float32.

    Raises:
      ValueError: as for `fused_adamw`; `momentum` is None.

    Example:
      >>> import jaxmp
      >>> tx = jaxmp.mixed_precision(fused_sgd(0.5), "bf16")
      >>> opt_state, params = tx.init(jnp.ones(2)), jnp.ones(2, jnp.bfloat16)
      >>> jaxmp.apply_gradients(tx, jnp.array([1.0, -1.0], jnp.bfloat16), opt_state, params)[0]
      Array([0.5, 1.5], dtype=bfloat16)
    """
    if momentum is None:
        raise ValueError("momentum must be a number; got None. Without momentum use optax.sgd(learning_rate).")
    plain = optax.sgd(learning_rate, momentum, nesterov)
    fields = {optax.TraceState: ("trace",)}
    rule = kernels.Momentum(momentum, nesterov)
    return _fused(plain, rule, fields, learning_rate, _no_scalars, 0.0, None, max_norm, state_dtype, backend)


def _check_numbers(**arguments: Any) -> None:
    for name, value in arguments.items():
        if callable(value):
            raise ValueError(
                f"in a fused optimizer only learning_rate may be a schedule; got one for {name}. Pass a number."
            )
        if name == "max_norm" and value is not None and not isinstance(value, (int, float)):
            raise ValueError(
                f"max_norm must be a Python number or None; got {type(value).__name__}. In inject_hyperparams pass "
                f'static_args=("max_norm",).'
            )


def _no_scalars(state: Any) -> tuple[Any, ...]:
    """For rules without scalars."""
    del state
    return ()


def _fused(
    plain: optax.GradientTransformation,
    rule: kernels.Rule,
    fields: dict[type, tuple[str, ...]],
    learning_rate: Any,
    scalars: Callable[[Any], tuple[Any, ...]],
    weight_decay: float,
    mask: Mask,
    max_norm: float | None,
    state_dtype: Any,
    backend: str,
) -> optax.GradientTransformationExtraArgs:
    """`plain` with a `write` function: a kernel that computes `rule`, and reads and writes the state of `plain`."""
    # fields: the type of the state with the moments, and the names of the moments in the rule's order.
    # scalars: gives the rule's scalars from the state before the step.
    kernel_backend.check(backend)
    _check_numbers(weight_decay=weight_decay, max_norm=max_norm)
    is_wide = jnp.dtype(state_dtype) == jnp.float32
    stored = optax.with_extra_args_support(plain) if is_wide else compress.compress_moments(plain, state_dtype)
    if max_norm is not None:
        stored = optax.with_extra_args_support(optax.chain(clip.clip_by_global_norm(max_norm), stored))
    ((kind, names),) = fields.items()

    def write_fn(
        grads: optimizers.Gradients, state: Any, params: PyTree, pairs: list[masters.Pair], step: optimizers.Step
    ) -> tuple[list[masters.Pair], Any, Array]:
        compress.check_form(state, state_dtype, compressed=not is_wide)
        (held,) = tree_paths.nodes_of(state, kind)
        trees = [jax.tree.flatten(getattr(held, name), is_leaf=is_quantized) for name in names]
        decays = _decays(weight_decay, mask, params)
        leaves = [
            kernels.Weight(g, param, master, tuple(moments), decay)
            for g, (param, master), decay, *moments in zip(
                grads.scaled, pairs, decays, *(leaves for leaves, _ in trees), strict=True
            )
        ]
        norm: Any = step.norm
        factor = grads.factor() * clip.factor_of(norm, max_norm) if max_norm else grads.factor()
        schedule = next(iter(find(state, optax.ScaleByScheduleState)), None)
        rate = learning_rate(schedule.count) if callable(learning_rate) and schedule is not None else learning_rate
        compressed = next(iter(find(state, compress.CompressedState)), None)
        number = step.number if compressed is None else optax.safe_increment(compressed.compress_count)
        new, saturated = kernels.multi_tensor_update(
            leaves,
            rule,
            factor=factor,
            learning_rate=jnp.asarray(rate, jnp.float32),
            step=number,
            scalars=scalars(state),
            taken=step.taken,
            backend=backend,
        )

        def advance(node: Any) -> Any:
            if isinstance(node, compress.CompressedState):
                inside = _map_states(advance, node.compressed)
                return compress.CompressedState(jnp.where(step.taken, number, node.compress_count), inside)
            if isinstance(node, GlobalNormState):
                return GlobalNormState(jnp.where(step.taken, norm, node.grad_norm))
            if isinstance(node, kind):
                moved = {
                    name: treedef.unflatten([w.moments[n] for w in new])
                    for n, (name, (_, treedef)) in enumerate(zip(names, trees, strict=True))
                }
                node = node._replace(**moved)
            if "count" in getattr(node, "_fields", ()):
                node = node._replace(count=jnp.where(step.taken, optax.safe_increment(node.count), node.count))
            return node

        return [masters.Pair(w.param, w.master) for w in new], _map_states(advance, state), saturated

    def update_fn(updates: PyTree, state: Any, params: PyTree = None, **extra_args: Any) -> tuple[PyTree, Any]:
        compress.check_form(state, state_dtype, compressed=not is_wide)
        return stored.update(updates, state, params, **extra_args)

    transform = optimizers.InPlace(stored.init, update_fn)
    transform.write, transform.measures, transform.backend = write_fn, bool(max_norm), backend
    return transform


def _map_states(f: Callable[[Any], Any], state: Any) -> Any:
    """`state` with `f(node)` in place of each outermost NamedTuple, also inside the tuples of a chain."""
    is_state = lambda x: hasattr(x, "_fields")  # noqa: E731
    return jax.tree.map(lambda x: f(x) if is_state(x) else x, state, is_leaf=is_state)


def _decays(weight_decay: float, mask: Mask, params: PyTree) -> list[float]:
    """The weight decay of each leaf."""
    if mask is None:
        return [weight_decay] * len(jax.tree.leaves(params))
    chosen = mask(params) if callable(mask) else mask
    flags = jax.tree.map(lambda on, part: jax.tree.map(lambda _: bool(on), part), chosen, params)
    return [weight_decay if on else 0.0 for on in jax.tree.leaves(flags)]
