"""Kernels that nobody trains, in fp8: one byte for each element, with a power of two for each column.

    e = ceil(log2(amax / 448))        q = e4m3(w * 2^-e)        w ~ q * 2^e

with amax = max |w| over the axis before the last. A power of two costs no precision, and every q * 2^e is a bfloat16
number, so the product with a 16-bit array is that of the rounded kernel. It is no product in fp8: the activations stay
in 16 bits, and any hardware runs it.

A `FrozenKernel` stands in the params in place of an array, and becomes one where a layer reads it (`jax.numpy.asarray`
calls `__jax_array__`). A derivative would keep that array: two bytes for each element. `jaxmp.autocast` sees by the
name of `widened` what was made of a frozen kernel, and has each product make it again in its backward pass.

`jax.tree.map` and optax see the arrays inside. What they compute keeps the dtypes, often: 2 * q and 2 * e are arrays
like q and e. So there are two more arrays. The lock holds True: with a number it becomes an array of numbers, so a
product, a sum or a bound of 10 is known by its dtype. The guard is an odd number of fp8's smallest steps below zero,
which e chooses: sums of two kernels, rounding, and optimizers, which restore dtypes, change it, or change e. A kernel
with a wrong lock or guard is NaN.

References:
  Dettmers et al. 2023, QLoRA (arXiv 2305.14314), which stores the base in 4 bits and widens it in the same places.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import serialization
from jax import lax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Bool, Float, Int, PyTree

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.numerics import casting, float_bits, quantize

_DTYPE = jnp.float8_e4m3fn
_DTYPES = tuple(map(np.dtype, (_DTYPE, np.int8, _DTYPE, np.bool)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class FrozenKernel:
    """A kernel in fp8, which reads as an array; see `freeze`.

    Attributes:
      q: float8_e4m3fn, of the shape of the kernel.
      log2_scale: int8, of that shape with 1 in place of the axis before the last: the exponent of each column.
      guard: float8_e4m3fn, like `log2_scale`: what it must be for that exponent, see above.
      lock: bool, like `log2_scale`: True.
      dtype: in which it reads as an array, that of the kernel before.

    Example:
      >>> kernel = freeze({"kernel": jnp.full((4, 2), 0.3)})["kernel"]
      >>> kernel.q.dtype.name, kernel.log2_scale.tolist(), (jnp.ones(4) @ kernel).tolist()
      ('float8_e4m3fn', [[-10, -10]], [1.25, 1.25])
    """

    q: Float[Array, "... k n"]
    log2_scale: Int[Array, "... 1 n"]
    guard: Float[Array, "... 1 n"]
    lock: Bool[Array, "... 1 n"]
    dtype: Any = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the kernel."""
        return self.q.shape

    @property
    def ndim(self) -> int:
        """That of the kernel."""
        return self.q.ndim

    @property
    def size(self) -> int:
        """That of the kernel."""
        return self.q.size

    @property
    def T(self) -> Array:
        """The transposed kernel as an array."""
        return jnp.asarray(self).T

    @property
    def mT(self) -> Array:
        """The kernel as an array with its last two axes swapped."""
        return jnp.asarray(self).mT

    def __jax_array__(self) -> Array:
        parts = [getattr(self, name) for name in _PARTS]
        dtypes = tuple(np.dtype(x.dtype) for x in parts)
        got = "" if dtypes == _DTYPES else f"parts in {', '.join(map(str, dtypes))}"
        if not got and all(map(_is_readable, parts[1:])):
            log2_scale, guard, lock = map(np.asarray, parts[1:])
            is_own = np.array_equal(guard.view(np.uint8), _guard_bits(log2_scale)) and lock.all()
            got = "" if is_own else "other numbers"
        if got:
            raise TypeError(
                f"a frozen kernel must stay as freeze made it; got {got}, as jax.tree.map and optax make them of its "
                f"parts. Compute with jnp.asarray(kernel), and freeze again; train adapters by an optimizer of their "
                f"own."
            )
        # Autocast traces in float32, and casts afterwards.
        return widened(*parts, jnp.float32 if ambient.AUTOCAST.value[1] else self.dtype)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        del copy
        return np.asarray(jnp.asarray(self), dtype)

    def __getitem__(self, key: Any) -> Any:
        return jnp.asarray(self)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        raise TypeError(
            "a frozen kernel cannot be written into; compute with jnp.asarray(kernel), and put that array in its place "
            "(in nnx, param.set_value(array))."
        )

    def __len__(self) -> int:
        return len(self.q)

    def __iter__(self) -> Iterator[Array]:
        return iter(jnp.asarray(self))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"'FrozenKernel' object has no attribute {name!r}")
        raise AttributeError(f"a frozen kernel is no array; got .{name}. Write jnp.asarray(kernel).{name}.")

    def astype(self, dtype: Any) -> Array:
        """The kernel as an array."""
        return jnp.asarray(self).astype(dtype)


def is_frozen(x: Any) -> bool:
    """Whether this is a `FrozenKernel`."""
    return isinstance(x, FrozenKernel)


def _operator(name: str) -> Callable[..., Array]:
    return lambda kernel, *others: getattr(jnp.asarray(kernel), name)(*others)


_BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul")
for _name in (*_BINARY, *(f"r{name}" for name in _BINARY), "eq", "ne", "lt", "le", "gt", "ge", "neg", "pos", "abs"):
    setattr(FrozenKernel, f"__{_name}__", _operator(f"__{_name}__"))


def _from_state_dict(kernel: FrozenKernel, state: Any) -> FrozenKernel:
    if not isinstance(state, dict) or state.keys() != {*_PARTS}:
        raise ValueError(
            f"a frozen kernel must come from a frozen one; got {type(state).__name__}. Load it, then freeze."
        )
    return FrozenKernel(**state, dtype=kernel.dtype)


_PARTS = ("q", "log2_scale", "guard", "lock")
serialization.register_serialization_state(
    FrozenKernel, lambda kernel: {name: getattr(kernel, name) for name in _PARTS}, _from_state_dict
)


@jax.custom_jvp
def _not_differentiated(q: Array) -> Array:
    return q


@functools.partial(_not_differentiated.defjvp, symbolic_zeros=True)
def _refuse(primals: tuple[Array], tangents: tuple[Any]) -> tuple[Array, Any]:
    if not isinstance(tangents[0], SymbolicZero):
        raise TypeError(
            "a frozen kernel has no gradient; got a loss that is differentiated by it. Differentiate the adapters "
            "alone: pass the base in another argument, in nnx wrt=nnx.LoRAParam."
        )
    return primals[0], tangents[0]


def _is_readable(x: Any) -> bool:
    """Whether an array has its numbers here, and now."""
    return not isinstance(x, Tracer) and getattr(x, "is_fully_addressable", True)


def _guard_bits(log2_scale: Any) -> Any:
    """The bits of the guard of exponents, uint8: -1, -3, ... -13 times 2^-9 by turns, as the exponent goes up.

    -15 times 2^-9 for -1, 0 and 1, which are what a bound or a sign makes of an exponent. Each is odd, so that no
    multiple of one is the guard of that multiple of its exponent.
    """
    xp = jnp if isinstance(log2_scale, jax.Array) else np
    e = log2_scale.astype(np.int32)
    return xp.where(xp.abs(e) <= 1, 0x8F, 0x81 + 2 * (e % 7)).astype(np.uint8)


def _widened(q: Array, log2_scale: Array, guard: Array, lock: Array, dtype: Any) -> Array:
    scale = float_bits.normal_power_of_two(log2_scale.astype(jnp.float32))
    is_own = (lax.bitcast_convert_type(guard, jnp.uint8) == _guard_bits(log2_scale)) & lock
    scale = jnp.where(is_own, scale, jnp.nan)
    return (_not_differentiated(q).astype(jnp.float32) * scale).astype(dtype)


WIDENED = "jaxmp_widened_frozen_kernel"
_widened.__name__ = WIDENED
widened = jax.jit(_widened, static_argnums=4)


def freeze(params: PyTree, patterns: str | Iterable[str] = "*kernel") -> PyTree:
    """`params` with kernels in fp8, for the base under adapters: nobody can train them any more.

    A kernel takes one byte for each element, and three for each column: a column runs along the axis before the last.
    Layers of linen and nnx and plain functions read it as an array. Under `jaxmp.autocast`, so in a loss of
    `jaxmp.value_and_grad(policy=)`, also in `lax.scan` and remat, the backward pass keeps no 16-bit copy of it: each
    product widens it again. Elsewhere the results are the same, and the copy is kept. Differentiate with respect to the
    adapters alone, and pass the base in another argument of the loss; in nnx, `wrt=nnx.LoRAParam` does that.

        base = jaxmp.fp8.freeze(base)                                              # linen, plain pytrees
        nnx.update(model, jaxmp.fp8.freeze(nnx.state(model, nnx.Param)))           # nnx

    Args:
      params: a tree of arrays.
      patterns: which leaves, by path patterns; they have two axes or more, and floats of 16 bits or more.

    Returns:
      The tree with a `FrozenKernel` in place of each such leaf. An element that is not finite becomes NaN; no finite
      one rounds up to infinity in float16 or float32. `jax.tree.map` sees the parts of a frozen kernel: what it
      computes with them is an error where the kernel is read, or NaN under jit.

    Raises:
      ValueError: no leaf fits; a leaf that fits has other axes or numbers, or is frozen already, named by path.

    Warns:
      UserWarning: one of several patterns fits no leaf.

    Example:
      >>> params = {"base": {"kernel": jnp.ones((64, 32))}, "lora": {"a": jnp.ones((64, 2)), "b": jnp.zeros((2, 32))}}
      >>> def loss_fn(lora, base, x):
      ...     return jnp.mean((x @ base["kernel"] + x @ lora["a"] @ lora["b"]) ** 2)
      >>> base = freeze(params["base"])
      >>> jax.grad(loss_fn)(params["lora"], base, jnp.ones((8, 64)))["b"].shape
      (2, 32)
    """
    paths = list(tree_paths.leaves_by_path(params, is_frozen))
    if not any(tree_paths.matches(path, patterns) for path in paths):
        raise ValueError(f"freeze must fit a leaf; got none for {patterns!r}. The params are {', '.join(paths[:4])}.")
    tree_paths.warn_of_idle("freeze(patterns)", patterns, paths, of="param")

    def frozen(path: str, x: Any) -> Any:
        if not tree_paths.matches(path, patterns):
            return x
        if is_frozen(x) or not casting.is_float(x) or x.ndim < 2:
            got = f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else type(x).__name__
            got = "one that is frozen" if is_frozen(x) else got
            raise ValueError(
                f"a frozen kernel is made of floats with two axes or more; got {got} at {path}. Pass patterns that fit "
                f"kernels alone."
            )
        return kernel_of(x)

    return tree_paths.map_with_path(frozen, params, is_leaf=is_frozen)


def kernel_of(x: Any) -> FrozenKernel:
    """An array, or its description, frozen."""
    if isinstance(x, jax.ShapeDtypeStruct):
        return jax.eval_shape(kernel_of, x)
    x = jnp.asarray(x)
    q, log2_scale, guard, lock = _quantized(x)
    return FrozenKernel(q, log2_scale, guard, lock, np.dtype(x.dtype))


# Numbers above these, which e4m3 has at any power of two, would round up to 2^16 and 2^128. (float16 has 65504 for what
# is below 65520.)
_BELOW_THE_TOP = {65519.996: 61440.0, float(np.finfo(np.float32).max): 1.875 * 2.0**127}


@jax.jit
def _quantized(x: Array) -> tuple[Array, Array, Array, Array]:
    """(q, log2_scale, guard, lock) of a kernel."""
    x = x.astype(jnp.float32)
    for top, below in _BELOW_THE_TOP.items():
        x = jnp.where((jnp.abs(x) > below) & (jnp.abs(x) <= top), jnp.copysign(jnp.float32(below), x), x)
    amax = jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0), axis=-2, keepdims=True, initial=0)
    log2 = float_bits.exponent_of_largest_scale(jnp.where(amax > 0, amax, 1), float(jnp.finfo(_DTYPE).max))
    log2 = jnp.clip(log2, -126, 126)
    x = jnp.where(jnp.isfinite(x), x, jnp.nan)
    q = quantize.quantize(x, float_bits.normal_power_of_two(log2.astype(jnp.float32)), _DTYPE)
    log2_scale = (-log2).astype(jnp.int8)
    guard = lax.bitcast_convert_type(_guard_bits(log2_scale), _DTYPE)
    return q, log2_scale, guard, jnp.ones(log2_scale.shape, bool)
