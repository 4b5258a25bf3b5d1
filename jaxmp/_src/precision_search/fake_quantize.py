"""Fake quantization: a function in float32 whose matmuls round like another format, or do not round, as chosen.

The gradient of the whole model shows the error of a format. If you change one layer after the other, it shows which
layer is the cause. So every matmul y = x w with the gradient g of y runs as

    y  = R(F(x) F(w))        F rounds operands, R results
    dx = R(B(g) F(w)^T)      B rounds gradients that come back
    dw = R(F(x)^T B(g))

in float32, with roundings that XLA cannot remove (`casting.round_to_grid`; it removes pairs of casts). The roundings
are *data*: a few numbers for each matmul, arguments of the compiled program. One program serves every choice.

    format      F              B              R
    "fp32"      -              -              -
    "bf16"      bfloat16       bfloat16       bfloat16
    "fp16"      float16        float16        float16: inf beyond 65504; gradients times the loss scale
    "fp8"       e4m3, scaled   e5m2, scaled   bfloat16
    "e4m3"      e4m3, scaled   e4m3, scaled   bfloat16
    "e5m2"      e5m2, scaled   e5m2, scaled   bfloat16
    "off"       the result is zero

"Scaled" means by the power of two of `jaxmp.fp8.CurrentScaling`: one for each tensor, from the tensor itself. Sums
inside a matmul are float32, as in a tensor core (which adds fp8 products with fewer bits). All other operations stay in
float32.
"""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.numerics import casting, float_bits, formats
from jaxmp._src.numerics.quantize import largest_magnitude
from jaxmp._src.programs import taps


class Grid(NamedTuple):
    """One rounding, as numbers: float32[] each, or stacked.

    Attributes:
      limit: the largest finite number.
      overflow: from this value on the result is inf; NaN: values saturate at the limit.
      smallest_normal: the smallest number with all bits of the mantissa.
      step: the spacing of numbers above 1.
      scaled: 1: the tensor is multiplied by the scale for its own amax; 0: by `factor`.
      factor: a power of two; a loss scale.
    """

    limit: Any
    overflow: Any
    smallest_normal: Any
    step: Any
    scaled: Any
    factor: Any


class Roundings(NamedTuple):
    """The roundings of one matmul.

    Attributes:
      operand: of x and w.
      result: of y.
      cotangent: of the gradient of y.
      gradient: of the gradients of x and w.
      kept: 1, or 0 for a matmul that is switched off.
    """

    operand: Grid
    result: Grid
    cotangent: Grid
    gradient: Grid
    kept: Any


NAMES = ("fp32", "bf16", "fp16", "fp8", "e4m3", "e5m2", "off")


def grid(name: str, loss_scale: float = 1.0) -> Grid:
    """The rounding to one format.

    Args:
      name: "fp32" (float32's own numbers down to 2^-103), "bf16", "fp16", "e4m3" or "e5m2".
      loss_scale: of what is rounded to float16.
    """
    info = jnp.finfo(formats.DTYPES[name])
    largest, step = float(info.max), 2.0**-info.nmant
    # Halfway to the next number that the format lacks: round-to-even would go up to it.
    halfway = {8: np.nan, 16: largest + 2.0 ** np.floor(np.log2(largest)) * step / 2, 32: np.inf}
    smallest = max(float(info.smallest_normal), 2.0**-126 / step)  # float32 has no smaller spacing
    factor = loss_scale if name == "fp16" else 1.0
    return Grid(*(np.float32(x) for x in (largest, halfway[info.bits], smallest, step, info.bits == 8, factor)))


def roundings(format: str | tuple[str, str], *, loss_scale: float = 1.0, results: str | None = None) -> Roundings:
    """The roundings of a matmul that runs in a format of the table above, or in a pair (forward, backward).

    `results` ("fp32", "bf16" or "fp16") replaces the table's format of results.
    """
    pair = format if isinstance(format, tuple) else (("e4m3", "e5m2") if format == "fp8" else (format, format))
    if len(pair) != 2 or any(name not in NAMES or name == "fp8" for name in pair):
        names = ", ".join(map(repr, NAMES))
        raise ValueError(
            f"a format is one of {names}, or a pair (forward, backward) of these without fp8; got {format!r}"
        )
    # Division by a power of two changes only the exponent bits.
    if math.frexp(loss_scale)[0] != 0.5 or not 2.0**-126 <= loss_scale <= 2.0**126:
        raise ValueError(
            f"loss_scale must be a power of two from 2^-126 to 2^126, because other scales round gradients; "
            f"got {loss_scale}. Pass 2.0**n."
        )
    forward, backward = (("fp32" if name == "off" else name) for name in pair)
    result = results or ("bf16" if forward in ("e4m3", "e5m2") else forward)
    gradient = results or ("bf16" if backward in ("e4m3", "e5m2") else backward)
    return Roundings(
        operand=grid(forward),
        result=grid(result),
        cotangent=grid(backward, loss_scale),
        gradient=grid(gradient, loss_scale),
        kept=np.float32("off" not in pair),
    )


def rounded(x: Float[Array, "..."], by: Grid) -> Float[Array, "..."]:
    """`x` rounded, in its own dtype."""
    wide = x.astype(jnp.float32)
    return rounded_under(wide, scale_of(largest_magnitude(wide), by), by).astype(x.dtype)


def rounded_under(x: Float[Array, "..."], scale: Float[Array, ""], by: Grid) -> Float[Array, "..."]:
    """float32 `x`, multiplied by a power of two, rounded, and divided by it."""
    scaled = x * scale
    on_grid = casting.round_to_grid(jnp.clip(scaled, -by.limit, by.limit), by.smallest_normal, by.step)
    result = jnp.where(jnp.abs(scaled) >= by.overflow, scaled * jnp.inf, on_grid)
    return result * float_bits.inverse_of_power_of_two(scale)


def scale_of(largest: Float[Array, ""], by: Grid) -> Float[Array, ""]:
    """The scale of a tensor with this largest magnitude: float32[], the largest power of two that saturates nothing.

    The same as of `CurrentScaling`, but at most 2^100 times the format's range.
    """
    below = float_bits.power_of_two_below(largest)
    inverse = float_bits.inverse_of_power_of_two(jnp.maximum(below, np.float32(2.0**-100)))
    scale = float_bits.power_of_two_below(jnp.asarray(by.limit)) * inverse  # exact
    scale = jnp.where(largest * scale > by.limit, scale * 0.5, scale)
    own = jnp.where((below > 0) & (below < jnp.inf), scale, 1.0)
    return jnp.where(by.scaled > 0, own, by.factor)


@jax.custom_vjp
def both_ways(x: Array, forward: Grid, backward: Grid) -> Array:
    """`x` rounded by `forward`; its gradient is the cotangent, rounded by `backward`."""
    del backward
    return rounded(x, forward)


def _both_forward(x: Array, forward: Grid, backward: Grid) -> tuple[Array, Grid]:
    return rounded(x, forward), backward


def _both_backward(backward: Grid, g: Array) -> tuple[Array, Grid, Grid]:
    nothing = jax.tree.map(jnp.zeros_like, backward)
    return rounded(g, backward), nothing, nothing


both_ways.defvjp(_both_forward, _both_backward)


def quantized_matmul(run: Callable[..., Array], operands: list[Any], by: Roundings) -> Array:
    """The matmul `run(*operands)` with roundings."""
    by = jax.tree.map(jnp.asarray, by)
    out = run(*(both_ways(x, by.operand, by.gradient) if _is_float(x) else x for x in operands))
    if not _is_float(out):
        return out
    return both_ways(jnp.where(by.kept > 0, out, jnp.zeros_like(out)), by.result, by.cotangent)


def _is_float(x: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(x), jnp.floating)


def fake_quantize(
    fn: Callable[..., Any], rules: Mapping[str, str | tuple[str, str]], *, loss_scale: float = 1.0
) -> Callable[..., Any]:
    """`fn`, with the matmuls and convolutions of some modules in another format: to find out which module matters.

        loss, grads = jax.value_and_grad(fake_quantize(loss_fn, {"Block_1/*": "fp8", "head": "off"}))(params, batch)

    Values are rounded to the format and stay float32, in the forward and in the backward pass: see the table above
    (operands, results, and the gradients of both). Pass a function in float32. It runs under jit, grad, vmap and remat,
    and rounds in scans (all layers of a scan are one module), but not in `cond`, `while`, `shard_map`, and functions
    with their own derivatives. Under `vmap` each example has its own scale. Reverse differentiation only.

    Args:
      fn: any function of pytrees; flax modules included (an nnx module has paths where it is an argument).
      rules: formats by patterns of the paths of modules, "" for what is in no module; the first
        that fits counts, others stay float32. A format is "fp8" (e4m3 forwards, e5m2 backwards), "e4m3", "e5m2",
        "fp16", "bf16", "fp32", "off" (the result is zero), or a pair of these, (forward, backward).
      loss_scale: float16 gradients are rounded as if the loss had been multiplied by this power of two.

    Returns:
      The function, with the same arguments and results.

    Raises:
      ValueError: an unknown format; a loss scale that is no power of two; when called, a pattern that no module
        with a matmul fits.

    Example:
      >>> def fn(x, w):
      ...     with jax.named_scope("mlp"):
      ...         return x @ w
      >>> x, w = jnp.array([[1.1]]), jnp.array([[1.0]])
      >>> [float(fake_quantize(fn, {"mlp": name})(x, w)[0, 0]) for name in ("fp32", "fp16", "fp8", "off")]
      [1.100000023841858, 1.099609375, 1.125, 0.0]
    """
    chosen = {pattern: roundings(name, loss_scale=loss_scale) for pattern, name in rules.items()}

    @functools.wraps(fn)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        paths: set[str] = set()

        def hook(site: taps.Site, run: Callable[..., Array], operands: list[Any]) -> Array:
            paths.add(site.path)
            pattern = tree_paths.first_match(site.path, chosen)
            return run(*operands) if pattern is None else quantized_matmul(run, operands, chosen[pattern])

        out = taps.replace_matmuls(fn, hook)(*args, **kwargs)
        idle = tree_paths.idle_messages("fake_quantize", chosen, sorted(paths), of="module with a matmul")
        if idle:  # no warning: the result would say that the module does not matter
            raise ValueError(idle[0])
        return out

    return wrapped


def stacked(each: list[Roundings]) -> PyTree:
    """Roundings of several matmuls as arrays with a leading axis."""
    return jax.tree.map(lambda *xs: np.stack(xs), *each)
