"""The fp8 leaves of params while a loss is differentiated: converted once before, and converted back once after.

The "gradient" of a scale leaf is an amax, so gradients of one leaf combine by MAX and not by addition; and the leaf of
a gradient tensor is adjusted by the loss scale, because that multiplies the gradients (see `scale_leaves`).

`Fp8Gradients` is made from the params before the first microbatch. Its methods replace `jax.grad`, the sum over
microbatches and the reduction over devices. For params without fp8 leaves they do nothing else.
"""

from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import ambient, compat
from jaxmp._src.base.warn import warn
from jaxmp._src.fp8 import scale_leaves
from jaxmp._src.programs import jaxprs

Check = Callable[[Any, Any], None]
Grad = Callable[[Callable[..., Any], Check | None], Callable[..., tuple[PyTree, Any]]]


class Fp8Gradients:
    """How the gradients of one set of params are taken, added up and reduced; see the module's docstring."""

    def __init__(self, params: PyTree, gradient_scale: Float[Array, ""]):
        """Makes the leaves ready.

        Args:
          params: what will be differentiated with respect to.
          gradient_scale: float32[], the factor by which the gradients are larger than unscaled gradients.
        """
        self.is_used = scale_leaves.has_scales(params)
        self._gradient_scale = gradient_scale

    def grad(self, loss: Callable[..., Any], differentiated: Grad) -> Callable[..., tuple[PyTree, Any]]:
        """`differentiated(loss, check)`; in its gradients, scale leaves hold the amaxes of unscaled gradients, or -inf.

        `differentiated` is like `jax.grad` with `has_aux` and `allow_int`, and calls `check(pullback, value)`
        before the backward pass.

        Warns:
          UserWarning: the params hold fp8 scales, and `loss` multiplied nothing in fp8.
        """
        if not self.is_used:
            return differentiated(loss, None)

        def differentiate(params: PyTree, *args: Any) -> tuple[PyTree, Any]:
            params = scale_leaves.enter(params, self._gradient_scale)
            before = ambient.now().notes.fp8_matmuls

            def check(pullback: Any, value: Any) -> None:
                if ambient.now().notes.fp8_matmuls == before and not _is_in_fp8(pullback, value):
                    _tell_of_no_fp8()

            grads, aux = differentiated(loss, check)(params, *args)
            return scale_leaves.leave(grads, self._gradient_scale), aux

        return differentiate

    def nothing(self, zeros: PyTree) -> PyTree:
        """What `add` begins with: `zeros` for gradients, -inf for amaxes."""
        return scale_leaves.map_scales(lambda _, x: x - np.float32(np.inf), zeros)

    def add(self, sums: PyTree, grads: PyTree) -> PyTree:
        """float32 sums of gradients so far, with those of one more microbatch; of amaxes the larger."""
        totals = jax.tree.map(lambda total, g: total + g.astype(jnp.float32), sums, grads)
        return scale_leaves.map_scales(lambda _, total, so_far, g: jnp.maximum(so_far, g), totals, sums, grads)

    def over_devices(self, grads: PyTree, params: PyTree) -> PyTree:
        """`grads` with records of the MAX of amaxes over all bound axes; gradients stay this device's own."""
        return scale_leaves.max_of_scales(grads, params, compat.manual_axes())


def warn_of_unmoved_scales(layers: Collection[str]) -> None:
    """Warns of fp8 layers in a loss whose scales are not differentiated."""
    if layers:
        warn(
            "unmoved-fp8-scales",
            f"fp8 scales must be in what value_and_grad differentiates; those of {', '.join(layers)} are closed over, "
            f"or not in argnums. Run a network that another loss trains (a critic, a discriminator, a teacher) in 16 "
            f"bits here: call it in `with jaxmp.fp8.autocast(enabled=False):`. To freeze weights, differentiate all "
            f"params, and freeze in jaxmp.mixed_precision(optax.multi_transform(...), policy); with nnx pass "
            f"wrt=nnx.Any(nnx.LoRAParam, jaxmp.nnx.Fp8Scale).",
        )


def _is_in_fp8(pullback: Any, value: Any) -> bool:
    """Whether a loss that noted nothing computes in fp8: jax keeps what `jit` and `checkpoint` traced before."""
    linear = compat.linear_jaxpr(pullback)
    if linear is not None and jaxprs.reads_fp8(linear):
        return True
    one = compat.as_varying(jnp.ones_like(value), tuple(compat.varying_axes(value)))
    return jaxprs.reads_fp8(jax.make_jaxpr(pullback)(one))


def _tell_of_no_fp8() -> None:
    """A warning; in a calibration, which would calibrate nothing, a ValueError."""
    text = (
        "a loss of params with fp8 scales must multiply in fp8; got none that does. Pass "
        'policy="fp8" to jaxmp.value_and_grad (or calibrate), or call the model in `with jaxmp.fp8.autocast()`.'
    )
    if ambient.FP8_CALIBRATING.value:
        raise ValueError(text)
    warn("fp8-layers-outside-fp8", text)
