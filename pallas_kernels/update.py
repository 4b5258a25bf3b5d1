"""The optimizer's side of a step as one pass: gradient, master and moments in; master, moments and model's copy out.

    g          = factor * grad                    unscaled, and clipped by the global norm
    moments    = rule.moments(g, moments)         AdamW, Lion, SGD with momentum
    u          = rule.direction(g, moments)
    w          = w - lr * (u + decay * w)
    param      = round(w)                         where the model holds fewer bits

All leaves of a tree share a few launches (`multi_tensor`), every array is written where it stands, and a step that is
not taken (`taken` false) touches none. A value that would become inf or NaN stays what it was, so that nothing
non-finite enters the state.

The weight of a leaf is in float32, in one of three places: the param itself; a float32 master beside a 16-bit param
that is only written; or a bfloat16 param and its remainder (`moments.split`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import backend as backends, meshes, moments as _moments, multi_tensor, reference
from pallas_kernels.moments import Quantized


class Rule(Protocol):
    """How an optimizer turns a gradient into a step; hashable, and equal for equal arithmetic. All is float32."""

    @property
    def signed(self) -> tuple[bool, ...]:
        """Of each moment, whether it can be negative."""
        ...

    def moments(self, g: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
        """The moments after the step."""
        ...

    def direction(self, g: Array, old: tuple[Array, ...], new: tuple[Array, ...], scalars: tuple[Any, ...]) -> Array:
        """What the weight moves against, times lr; from moments before or after, and the rule's own scalars."""
        ...


class AdamW(NamedTuple):
    """Adam (Kingma and Ba 2015), as `optax.scale_by_adam`; scalars: 1 - b1^t, 1 - b2^t.

    Example:
      >>> g, zero = jnp.float32(2.0), jnp.float32(0.0)
      >>> rule = AdamW(b1=0.5, b2=0.75)
      >>> [float(m) for m in rule.moments(g, (zero, zero))]
      [1.0, 1.0]
    """

    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    eps_root: float = 0.0

    @property
    def signed(self) -> tuple[bool, ...]:
        """The first moment is signed, the second not."""
        return True, False

    def moments(self, g: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
        """Averages of g and of g^2."""
        mu, nu = old
        return (1 - self.b1) * g + self.b1 * mu, (1 - self.b2) * (g * g) + self.b2 * nu

    def direction(self, g: Array, old: tuple[Array, ...], new: tuple[Array, ...], scalars: tuple[Any, ...]) -> Array:
        """The mean over the root of the mean square, both without the bias of their start at zero."""
        del g, old
        mu, nu = new
        return (mu / scalars[0]) / (jnp.sqrt(nu / scalars[1] + self.eps_root) + self.eps)


class Lion(NamedTuple):
    """Lion (Chen et al. 2023), as `optax.scale_by_lion`.

    Example:
      >>> g, mu = jnp.float32(-2.0), jnp.float32(1.0)
      >>> float(Lion(b1=0.5).direction(g, (mu,), (), ()))
      -1.0
    """

    b1: float = 0.9
    b2: float = 0.99

    @property
    def signed(self) -> tuple[bool, ...]:
        """One moment, signed."""
        return (True,)

    def moments(self, g: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
        """The average of g."""
        return ((1 - self.b2) * g + self.b2 * old[0],)

    def direction(self, g: Array, old: tuple[Array, ...], new: tuple[Array, ...], scalars: tuple[Any, ...]) -> Array:
        """The sign of a shorter average; 0 and NaN stay."""
        del new, scalars
        x = (1 - self.b1) * g + self.b1 * old[0]
        one = jnp.ones_like(x)
        return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


class Momentum(NamedTuple):
    """SGD with momentum, as `optax.trace`; nesterov: the step looks ahead.

    Example:
      >>> g, old = jnp.float32(1.0), (jnp.float32(2.0),)
      >>> [float(m) for m in Momentum(decay=0.5).moments(g, old)]
      [2.0]
    """

    decay: float = 0.9
    nesterov: bool = False

    @property
    def signed(self) -> tuple[bool, ...]:
        """One moment, signed."""
        return (True,)

    def moments(self, g: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
        """The sum of all g, old ones decayed."""
        return (g + self.decay * old[0],)

    def direction(self, g: Array, old: tuple[Array, ...], new: tuple[Array, ...], scalars: tuple[Any, ...]) -> Array:
        """That sum, or the next one."""
        del old, scalars
        return g + self.decay * new[0] if self.nesterov else new[0]


class Weight(NamedTuple):
    """One leaf of the tree.

    Attributes:
      grad: float16, bfloat16 or float32; still scaled.
      param: the model's copy; None where it is the master (float32), or is written elsewhere.
      master: float32; or the remainder of a bfloat16 param, int16 or int8.
      moments: as many as the rule has; float32, bfloat16 or `Quantized`.
      decay: weight decay.

    Example:
      >>> w = Weight(jnp.ones(2, jnp.float16), jnp.zeros(2, jnp.float16), jnp.zeros(2), (jnp.zeros(2),))
      >>> w.master.dtype.name, w.decay
      ('float32', 0.0)
    """

    grad: Array
    param: Array | None
    master: Array
    moments: tuple[Array | Quantized, ...]
    decay: float = 0.0


class _Kind(NamedTuple):
    """What the arithmetic has to know of a leaf."""

    is_split: bool
    param_dtype: str | None
    moments: tuple[str, ...]  # of each: the dtype of what is stored


def multi_tensor_update(
    weights: Sequence[Weight],
    rule: Rule,
    *,
    factor: Float[Array, ""],
    learning_rate: Float[Array, ""],
    step: Any,
    scalars: Sequence[Any] = (),
    taken: Bool[Array, ""],
    backend: str = "auto",
) -> tuple[list[Weight], Float[Array, ""]]:
    """Moves all weights by one step of `rule`; see the module's docstring.

    Args:
      weights: the leaves; shapes within a leaf agree.
      rule: `AdamW`, `Lion`, `Momentum`, or your own.
      factor: float32[], multiplies the gradients: 1 / loss scale, times what clips them.
      learning_rate: float32[].
      step: number of the step, for the noise of stochastic rounding.
      scalars: the rule's own.
      taken: bool[]; False: nothing moves.
      backend: see `backend`.

    Returns:
      The weights after the step (their gradients as given), and how many float32 masters of float16 params stood beyond
      its range before the step, float32[]; that count is undefined where the step is not taken.

    Raises:
      ValueError: leaves whose parts do not fit, named by their number; a backend that cannot serve.

    Example:
      >>> w = Weight(jnp.ones(2, jnp.bfloat16), jnp.zeros(2, jnp.bfloat16), jnp.zeros(2), (jnp.zeros(2),))
      >>> one = jnp.float32(1.0)
      >>> (w,), _ = multi_tensor_update(
      ...     [w], Momentum(), factor=one, learning_rate=one * 0.5, step=1, taken=jnp.bool_(True), backend="xla"
      ... )
      >>> w.param
      Array([-0.5, -0.5], dtype=bfloat16)
    """
    backends.check(backend)
    for i, w in enumerate(weights):
        _check(i, w, rule)
    leaves = [_leaf(i, w) for i, w in enumerate(weights)]
    filled = [i for i, w in enumerate(weights) if w.grad.size]
    n_sums = int(any(w.param is not None and w.param.dtype == jnp.float16 for w in weights))
    all_scalars = (factor, learning_rate, jnp.asarray(step, jnp.float32), *scalars)

    def kernel(leaves: Any, scalars: Any, taken: Any, interpret: Any) -> Any:
        return meshes.apply(
            *_of(leaves, scalars), name="multi_tensor_update", n_sums=n_sums, when=taken, interpret=interpret
        )

    def plain(leaves: Any, scalars: Any, taken: Any) -> Any:
        return multi_tensor.reference(*_of(leaves, scalars), n_sums=n_sums, when=taken)

    statics = [leaves[i]._replace(reads=(), states=(), writes=()) for i in filled]

    def _of(arrays: Any, scalars: Any) -> Any:
        whole = [s._replace(reads=r, states=st, writes=w) for s, (r, st, w) in zip(statics, arrays, strict=True)]
        return functools.partial(_update, rule), whole, scalars

    if not filled:
        return list(weights), jnp.zeros((), jnp.float32)
    arrays = [(leaves[i].reads, leaves[i].states, leaves[i].writes) for i in filled]
    unmet = None
    if any(backends.varying_axes(x) for x in jax.tree.leaves(arrays)):
        unmet = "what varies over axes that jax.shard_map checks cannot be written in place (pass check_vma=False)"
    result = backends.run(backend, kernel, plain, arrays, all_scalars, taken, unmet=unmet)
    moved = list(weights)
    for i, new in zip(filled, result.leaves, strict=True):
        moved[i] = _put_back(weights[i], new)
    return moved, result.sums[0] if n_sums else jnp.zeros((), jnp.float32)


def _check(i: int, w: Weight, rule: Rule) -> None:
    if len(w.moments) != len(rule.signed):
        raise ValueError(f"{type(rule).__name__} has {len(rule.signed)} moments; leaf {i} has {len(w.moments)}")
    arrays = {"param": w.param, "master": w.master}
    arrays |= {f"moment {n}": m.codes if isinstance(m, Quantized) else m for n, m in enumerate(w.moments)}
    for name, x in arrays.items():
        if x is not None and x.shape != w.grad.shape:
            raise ValueError(
                f"all parts of a leaf have the shape of its gradient; leaf {i} has {name} of {x.shape} and grad of "
                f"{w.grad.shape}"
            )
    is_split = w.master.dtype != jnp.float32
    if is_split and (w.master.dtype not in (jnp.int16, jnp.int8) or w.param is None or w.param.dtype != jnp.bfloat16):
        raise ValueError(
            f"a master is float32, or int16 or int8 beside a bfloat16 param; leaf {i} has a master of {w.master.dtype} "
            f"and a param of {None if w.param is None else w.param.dtype}"
        )


def _leaf(i: int, w: Weight) -> multi_tensor.Leaf:
    is_split = w.master.dtype != jnp.float32
    states: list[Array] = [w.param, w.master] if is_split else [w.master]  # type: ignore
    stored, group = [], 1
    for m in w.moments:
        group = m.group if isinstance(m, Quantized) else group
        states += m if isinstance(m, Quantized) else [m]
        stored.append((m.codes if isinstance(m, Quantized) else m).dtype.name)
    writes = () if is_split or w.param is None else (w.param,)
    kind = _Kind(is_split, writes[0].dtype.name if writes else None, tuple(stored))
    return multi_tensor.Leaf((w.grad,), tuple(states), writes, (), (w.decay, float(i)), kind, group)


def _put_back(w: Weight, new: Sequence[Array]) -> Weight:
    """The leaf with the arrays that `_leaf` took from it, in its order."""
    left = list(new)
    is_split = w.master.dtype != jnp.float32
    param = left.pop(0) if is_split else None
    master = left.pop(0)
    moments = tuple(Quantized(left.pop(0), left.pop(0)) if isinstance(m, Quantized) else left.pop(0) for m in w.moments)
    if left:
        param = left.pop(0)
    return w._replace(param=param, master=master, moments=moments)


def _update(rule: Rule, values: multi_tensor.Values) -> tuple[list[Array], list[Array]]:
    """The arithmetic, for a block or for a whole leaf."""
    kind: _Kind = values.kind
    factor, learning_rate, step, *own = values.scalars
    decay, leaf = values.numbers
    states = list(values.states)
    param = states.pop(0) if kind.is_split else None
    stored = states.pop(0)
    weight = stored if param is None else _moments.join(param, stored)
    codecs = [_moments.codec_for(name, signed=signed) for name, signed in zip(kind.moments, rule.signed, strict=True)]
    old = [
        states.pop(0).astype(jnp.float32) if codec is None else _moments.decode(codec, states.pop(0), states.pop(0))
        for codec in codecs
    ]
    g = values.reads[0].astype(jnp.float32) * factor
    unguarded = rule.moments(g, tuple(old))
    u = rule.direction(g, tuple(old), unguarded, tuple(own))
    new = [_finite_or(x, before) for x, before in zip(unguarded, old, strict=True)]
    moved = _finite_or(weight - learning_rate * (u + decay * weight), weight)
    results = list(_moments.split(moved, stored.dtype)) if kind.is_split else [moved]
    narrow = any(name != "float32" for name in kind.moments)
    random: Any = _moments.noise(values.index(), leaf, step) if narrow else None
    for n, (x, codec, name) in enumerate(zip(new, codecs, kind.moments, strict=True)):
        bits: Any = None if random is None else (_moments.high_bits if n else _moments.low_bits)(random)
        if codec is not None:
            largest = values.group_max(jnp.abs(x))
            results += [_moments.encode(codec, x, largest, bits), largest]
        else:
            results.append(_moments.to_bfloat16(x, bits) if name == "bfloat16" else x)
    if kind.param_dtype is None:
        return results, []
    results.append(reference.saturating_cast(moved, kind.param_dtype))
    if kind.param_dtype != "float16":
        return results, []
    beyond = jnp.abs(weight) > float(jnp.finfo(jnp.float16).max)
    return results, [jnp.where(beyond, jnp.ones_like(weight), jnp.zeros_like(weight))]


def _finite_or(new: Array, old: Array) -> Array:
    """`new`, or `old` where that is finite and `new` is not."""
    return jnp.where(jnp.abs(new) < jnp.inf, new, jnp.where(jnp.abs(old) < jnp.inf, old, new))
