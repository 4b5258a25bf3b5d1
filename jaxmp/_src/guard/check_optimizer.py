"""Check that an optimizer survives tiny gradients: run it on some.

Adam divides by sqrt(v) + eps. If its state is float16, v = 0.001 g^2 is 0 for every |g| below 0.005, and the usual eps
of 1e-8 is 0 as well: m / 0 = inf in the first step, and 0 / 0 for a gradient of 0. Large float16 models diverged this
way.

An optax transform is a pair of closures, so its eps cannot be read. Its results can. A healthy optimizer moves a weight
about as far for a tiny gradient as for a gradient of 1, or less far. So this file runs some steps on a copy of the
params, cut to four elements along each axis, for g = 0 and for small g around the underflow of g^2 in float16 and in
float32. Each run has the gradients g, 0, g, ..., g, 0: RAdam divides for the first time in its sixth step, and NovoGrad
by a norm that it keeps from the step before. It reports a move that is not finite, or more than 32 times as far as for
g = 1.
"""

import math
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.numerics import casting
from jaxmp._src.step import inner_update
from jaxmp._src.step.optimizers import as_transformation
from pallas_kernels.when import in_dtype_of

# g^2, and a thousandth of it, underflows in float16 on the first, in float32 and bfloat16 on the second.
_SMALL = (*(2.0**k for k in range(-12, -5)), *(2.0**k for k in range(-63, -55)))
_GRADIENTS = np.array([1.0, 0.0, *_SMALL], np.float32)
_FAR = 32.0
_STEPS = np.array([1.0, 0.0, *[1.0] * 9, 0.0], np.float32)  # factors of g
_LARGEST_SIDE = 4


class _Finding(NamedTuple):
    path: str
    dtype: Any
    gradient: float
    move: float
    usual: float
    step: int


def check_optimizer(tx: optax.GradientTransformation, params: PyTree) -> bool | None:
    """Warns if `tx` divides by a number that underflows: an eps of 0, or too small for the dtype of its state.

    Call it once, before training. It runs a dozen steps of `tx` on a few elements of each leaf (see the module's
    docstring), takes some seconds for a thousand leaves, and changes nothing. `unscale_and_skip` and `mixed_precision`
    call it at `init` if the optimizer's state is float16.

    Args:
      tx: any optax transform.
      params: the params of `tx.update`, in the same dtypes; or `jax.ShapeDtypeStruct`s or tracers, because only shapes
        and dtypes are read.

    Returns:
      True: no fault was found. False: a fault was found and reported. None: unknown, because `tx` could not be run
      this way (it needs extra arguments such as `value_fn`, a bound axis, or params in other dtypes).

    Warns:
      UserWarning: the leaf, what the optimizer did there, and the fix.

    Example:
      >>> params = {"w": jnp.ones(3, jnp.float16)}
      >>> with warnings.catch_warnings(record=True) as caught:
      ...     warnings.simplefilter("always")
      ...     check_optimizer(optax.adam(1e-3), params)
      False
      >>> print(caught[0].message)
      an optimizer must not divide by what underflows; at w (float16) this one moves a weight by nan for a gradient of
      0 in step 1 (and by 0.001 for a gradient of 1): its eps is 0, or too small, in the dtype of its state. Keep ...
      >>> check_optimizer(optax.adam(1e-3), {"w": jnp.ones(3)})
      True
    """
    return warn_of_underflow(tx, params)


def warn_of_underflow(tx: optax.GradientTransformation, params: PyTree, *, grad_dtype: Any = None) -> bool | None:
    """`check_optimizer` for gradients of a given dtype; None: the dtype in which autodiff or jaxmp passes them."""
    try:
        with jax.ensure_compile_time_eval(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = _fault(tx, params, grad_dtype)
    except jax.errors.JaxRuntimeError:  # XLA cannot compile for this machine
        raise
    except Exception:  # the optimizer raises the same error, with its reason, at the first real update
        return None
    if found is None:
        return True
    warn(
        "optimizer-divides-by-underflow",
        f"an optimizer must not divide by what underflows; at {found.path} ({found.dtype}) this one moves a weight by "
        f"{found.move:.3g} for a gradient of {found.gradient:.3g} in step {found.step} (and by {found.usual:.3g} for a "
        f"gradient of 1): its eps is 0, or too small, in the dtype of its state. Keep the state in float32, with "
        f"jaxmp.mixed_precision or, without masters, jaxmp.float32_moments(inner); or raise eps: to 1e-8 in float32, "
        f"to 1e-3 in float16.",
    )
    return False


def _fault(tx: Any, params: PyTree, grad_dtype: Any) -> _Finding | None:
    rule = getattr(tx, "rule", None)
    given = params = jax.tree.map(_few_elements, params)
    if rule is not None:  # the moves of the optimizer inside, in float32
        tx, grad_dtype = rule.optimizer.inner, jnp.float32
        params = params if rule.policy is None else casting.cast_floats(params, jnp.float32)
    tx = as_transformation(tx)
    state = tx.init(params)
    extra_args: dict[str, Any] = {"value": jnp.ones(())}  # of the loss; some optimizers need it

    def moves(gradient: Float[Array, ""]) -> list[Array]:
        def grads(g: Any) -> PyTree:
            return jax.tree.map(lambda p: jnp.full_like(p, g, dtype=_grad_dtype_of(p, grad_dtype)), params)

        def step(state: Any, factor: Array) -> tuple[Any, list[Array]]:
            updates, after = inner_update.update(tx, grads(gradient * factor), state, params, extra_args)
            after = jax.tree.map(lambda new, old: in_dtype_of(new, old), after, state)
            return after, [jnp.max(jnp.abs(u.astype(jnp.float32))) for u in jax.tree.leaves(updates)]

        return jax.lax.scan(step, jax.tree.map(jnp.asarray, state), jnp.asarray(_STEPS))[1]

    found = [np.asarray(x) for x in jax.vmap(moves)(jnp.asarray(_GRADIENTS))]
    named = jax.tree_util.tree_leaves_with_path(given)
    for (key_path, p), by_gradient in zip(named, found, strict=True):
        path = tree_paths.path_str(key_path)
        if scale_leaves.is_scale(path) or not casting.is_float(p):
            continue
        usual, others = float(np.max(by_gradient[0])), by_gradient[1:]  # [gradient, step]
        bad = ~np.isfinite(others) | (others > _FAR * usual)
        if math.isfinite(usual) and bad.any():
            i, n = map(int, np.unravel_index(np.argmax(bad), bad.shape))
            return _Finding(path, p.dtype, float(_GRADIENTS[1 + i]), float(others[i, n]), usual, n + 1)
    return None


def _few_elements(x: Any) -> Any:
    if not hasattr(x, "dtype") or not (jnp.issubdtype(x.dtype, jnp.number) or x.dtype == bool):
        return x
    return jnp.ones([max(1, min(n, _LARGEST_SIDE)) for n in x.shape], x.dtype)


def _grad_dtype_of(param: Array, grad_dtype: Any) -> Any:
    return grad_dtype if grad_dtype is not None and casting.is_float(param) else param.dtype
