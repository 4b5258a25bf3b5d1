"""The optimizer's part of a step in one pass: reads gradient, master and moments; writes master, moments and param.

    g          = factor * grad                    unscaled, and clipped by the global norm
    moments    = rule.moments(g, moments)         AdamW, Lion, SGD with momentum
    u          = rule.direction(g, moments)
    w          = w - lr * (u + decay * w)
    param      = round(w)                         if the model's param has fewer bits

All leaves of a tree share a few launches (`multi_tensor`). Every array is written in place, and a skipped step (`taken`
false) reads and writes none. (So it must be for a gradient that is inf, NaN or so large that a moment overflows.)

The float32 weight of a leaf is in one of three places: the param itself; a float32 master, with a 16-bit param that is
only written; or a bfloat16 param together with its remainder (`moments.split`).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from pallas_kernels import (
    backend as backends,
    moments as _moments,
    multi_tensor,
    reference,
    when as skips,
)
from pallas_kernels.by_platform import by_platform, written
from pallas_kernels.moments import Quantized


class Rule(Protocol):
    """The arithmetic of an optimizer, in float32; rules are hashable, and equal for equal arithmetic."""

    @property
    def signed(self) -> tuple[bool, ...]:
        """For each moment, whether it can be negative."""
        ...

    def moments(self, g: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
        """The moments after the step."""
        ...

    def direction(self, g: Array, old: tuple[Array, ...], new: tuple[Array, ...], scalars: tuple[Any, ...]) -> Array:
        """u of w - lr * u, from the moments before and after the step and the rule's own scalars."""
        ...


class AdamW(NamedTuple):
    """Adam (Kingma and Ba 2015), like `optax.scale_by_adam`; its scalars are 1 - b1^t and 1 - b2^t.

    `nesterov`: with Nesterov's momentum (Dozat 2016), and a third scalar, 1 - b1^(t + 1).

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
    nesterov: bool = False

    @property
    def signed(self) -> tuple[bool, ...]:
        """The first moment is signed, the second not."""
        return True, False

    def moments(self, g: Array, old: tuple[Array, ...]) -> tuple[Array, ...]:
        """Averages of g and of g^2."""
        mu, nu = old
        return (1 - self.b1) * g + self.b1 * mu, (1 - self.b2) * (g * g) + self.b2 * nu

    def direction(self, g: Array, old: tuple[Array, ...], new: tuple[Array, ...], scalars: tuple[Any, ...]) -> Array:
        """mu / sqrt(nu), both divided by their bias correction; with nesterov, the mu of a next step with this g."""
        del old
        mu, nu = new
        ahead = self.b1 * (mu / scalars[2]) + (1 - self.b1) * (g / scalars[0]) if self.nesterov else mu / scalars[0]
        return ahead / (jnp.sqrt(nu / scalars[1] + self.eps_root) + self.eps)


class Lion(NamedTuple):
    """Lion (Chen et al. 2023), like `optax.scale_by_lion`.

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
        """The sign of an average with decay b1; 0 and NaN do not change."""
        del new, scalars
        x = (1 - self.b1) * g + self.b1 * old[0]
        one = jnp.ones_like(x)
        return jnp.where(x > 0, one, jnp.where(x < 0, -one, x))


class Momentum(NamedTuple):
    """SGD with momentum, like `optax.trace`; `nesterov`: Nesterov's momentum.

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
        """The sum g + decay * old."""
        return (g + self.decay * old[0],)

    def direction(self, g: Array, old: tuple[Array, ...], new: tuple[Array, ...], scalars: tuple[Any, ...]) -> Array:
        """The new moment; with nesterov, g + decay * the new moment."""
        del old, scalars
        return g + self.decay * new[0] if self.nesterov else new[0]


class Weight(NamedTuple):
    """The arrays of one leaf of the tree, all of the gradient's shape.

    Attributes:
      grad: float16, bfloat16 or float32; still scaled.
      param: the model's param; None if it is the master (float32), or if the caller writes it.
      master: float32; or the remainder of a bfloat16 param, int16 or int8.
      moments: the moments of the rule; each float32, bfloat16 or `Quantized`.
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
    """Static facts about a leaf for the arithmetic."""

    is_split: bool
    param_dtype: str | None
    moments: tuple[str, ...]  # the stored dtype of each moment


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
    """Updates all weights by one step of `rule`, in one pass over memory.

        g          = factor * grad
        moments    = rule.moments(g, moments)
        w          = w - learning_rate * (rule.direction(g, moments) + decay * w)
        param      = round(w)                         if the model's param has fewer bits

    Args:
      weights: the leaves; all arrays of a leaf have the shape of its gradient.
      rule: `AdamW`, `Lion`, `Momentum`, or your own.
      factor: float32[], multiplies the gradients: 1 / loss scale, times the factor of clipping.
      learning_rate: float32[].
      step: number of the step, for the noise of stochastic rounding.
      scalars: the rule's own scalars.
      taken: bool[]; if False, nothing changes.
      backend: see `pallas_kernels.backend`.

    Returns:
      The weights after the step (with the same gradients); and how many float32 masters of float16 params were beyond
      the range of float16 before the step, on this device: float32[], undefined if the step is not taken.

    Raises:
      ValueError: leaves whose parts do not fit, named by their number; a backend that cannot run.

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
    nothing = jnp.zeros((), jnp.float32)
    all_scalars = (factor, learning_rate, jnp.asarray(step, jnp.float32), *scalars)

    def kernel(leaves: Any, scalars: Any, taken: Any, interpret: Any) -> Any:
        return multi_tensor.apply(
            *_of(leaves, scalars), name="multi_tensor_update", n_sums=n_sums, when=taken, interpret=interpret
        )

    def plain(leaves: Any, scalars: Any, taken: Any) -> Any:
        f, whole, scalars = _of(leaves, scalars)

        def move(old: Any, sums: Any) -> Any:
            def computed(old: Any) -> Any:
                leaves = [leaf._replace(states=st, writes=w) for leaf, (st, w) in zip(whole, old, strict=True)]
                # XLA for TPU writes what the view of groups returns, and would read it again to choose.
                return multi_tensor.reference(f, leaves, scalars, n_sums=n_sums, when=taken, only_groups=True)

            if n_sums:  # sums of masters before the step: XLA for CPU must be told to count first, or it copies them
                both = computed(old).sums, old
                sums, old = by_platform(lambda x: x, both, cpu=lambda _, x: jax.lax.optimization_barrier(x))
            ends = [len(leaf.states) for leaf in whole]
            return [(x[:end], x[end:]) for x, end in zip(computed(old).leaves, ends, strict=True)], sums

        def choose(taken: Any, new: Any, old: Any) -> Any:
            leaves = zip(statics, new[0], old[0], strict=True)
            return [n if leaf.group > 1 else _chosen(leaf, taken, n, o) for leaf, n, o in leaves], *new[1:]

        old = [(leaf.states, leaf.writes) for leaf in whole]
        new, sums = skips.when(taken, move, old, (nothing,) * n_sums, choose=choose)
        return multi_tensor.Result([(*states, *writes) for states, writes in new], sums)

    statics = [leaves[i]._replace(reads=(), states=(), writes=()) for i in filled]

    def _of(arrays: Any, scalars: Any) -> Any:
        pairs = zip(statics, arrays, strict=True)
        whole = [s._replace(reads=r, states=st, writes=w, numbers=n or s.numbers) for s, (r, st, w, n) in pairs]
        return functools.partial(_update, rule), whole, scalars

    if not filled:
        return list(weights), nothing
    # A decay may be traced (a schedule), and the kernel must not close over it.
    numbers = [None if isinstance(weights[i].decay, int | float) else leaves[i].numbers for i in filled]
    arrays = [(leaves[i].reads, leaves[i].states, leaves[i].writes, n) for i, n in zip(filled, numbers, strict=True)]
    unmet = None
    if any(backends.varying_axes(x) for x in jax.tree.leaves(arrays)):
        unmet = (
            "arrays that vary over axes of a checked jax.shard_map cannot be written in place (pass check_vma=False)"
        )
    result = backends.run(backend, kernel, plain, arrays, all_scalars, taken, unmet=unmet, alone=True)
    moved = list(weights)
    for i, new in zip(filled, result.leaves, strict=True):
        moved[i] = _put_back(weights[i], new)
    return moved, result.sums[0] if n_sums else nothing


def _check(i: int, w: Weight, rule: Rule) -> None:
    if len(w.moments) != len(rule.signed):
        raise ValueError(f"{type(rule).__name__} needs {len(rule.signed)} moments; leaf {i} has {len(w.moments)}")
    arrays = {"param": w.param, "master": w.master}
    arrays |= {f"moment {n}": m.codes if isinstance(m, Quantized) else m for n, m in enumerate(w.moments)}
    for name, x in arrays.items():
        if x is not None and x.shape != w.grad.shape:
            raise ValueError(
                f"all parts of a leaf must have the shape of its gradient; leaf {i} has {name} of {x.shape} and grad "
                f"of {w.grad.shape}"
            )
    is_split = w.master.dtype != jnp.float32
    if is_split and (w.master.dtype not in (jnp.int16, jnp.int8) or w.param is None or w.param.dtype != jnp.bfloat16):
        raise ValueError(
            f"a master must be float32, or int16 or int8 beside a bfloat16 param; leaf {i} has a master of "
            f"{w.master.dtype} and a param of {None if w.param is None else w.param.dtype}"
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
    """`w` with the new arrays, which have the order that `_leaf` gave them."""
    left = list(new)
    is_split = w.master.dtype != jnp.float32
    param = left.pop(0) if is_split else None
    master = left.pop(0)
    moments = tuple(Quantized(left.pop(0), left.pop(0)) if isinstance(m, Quantized) else left.pop(0) for m in w.moments)
    if left:
        param = left.pop(0)
    return w._replace(param=param, master=master, moments=moments)


def _update(rule: Rule, values: multi_tensor.Values) -> tuple[list[Array], list[Array]]:
    """The arithmetic of the step, for a block or for a whole leaf."""
    kind: _Kind = values.kind
    factor, learning_rate, step, *own = values.scalars
    decay, leaf = values.numbers
    states = list(values.states)
    param = states.pop(0) if kind.is_split else None
    stored = states.pop(0)
    in_kernel = values.in_kernel
    weight = stored if param is None else _moments.join(param, stored, in_kernel=in_kernel)
    codecs = [_moments.codec_for(name, signed=signed) for name, signed in zip(kind.moments, rule.signed, strict=True)]
    old = [
        states.pop(0).astype(jnp.float32)
        if codec is None
        else _moments.decode(codec, states.pop(0), states.pop(0), in_kernel=in_kernel)
        for codec in codecs
    ]
    g = values.reads[0].astype(jnp.float32) * factor
    moment = rule.moments(g, tuple(old))
    u = rule.direction(g, tuple(old), moment, tuple(own))
    moved, new = weight - learning_rate * (u + decay * weight), moment
    moved = moved if in_kernel or not (kind.is_split or kind.param_dtype) else written(moved)
    sums = []
    if kind.is_split:
        bits_of_master = _moments.split_noise(values.index(), leaf, step) if stored.dtype == jnp.int8 else None
        results = list(_moments.split(moved, stored.dtype, bits_of_master, in_kernel=in_kernel))
    else:
        results = [moved]
    narrow = any(name != "float32" for name in kind.moments)
    random: Any = _moments.noise(values.index(), leaf, step) if narrow else None
    for n, (x, codec, name) in enumerate(zip(new, codecs, kind.moments, strict=True)):
        bits: Any = None if random is None else (_moments.high_bits if n else _moments.low_bits)(random)
        if codec is not None:
            largest = values.group_max(jnp.abs(x))
            results += [_moments.encode(codec, x, largest, bits), largest]
        else:
            results.append(_moments.to_bfloat16(x, bits, in_kernel=in_kernel) if name == "bfloat16" else x)
    if kind.param_dtype is None:
        return results, sums
    results.append(reference.saturating_cast(moved, kind.param_dtype))
    if kind.param_dtype == "float16":
        is_beyond = jnp.abs(weight) > float(jnp.finfo(jnp.float16).max)
        sums.append(jnp.where(is_beyond, jnp.ones_like(moved), jnp.zeros_like(moved)))
    return results, sums


def _chosen(leaf: multi_tensor.Leaf, taken: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The select of the arrays of a leaf. What is made from the weight is made from the one that was chosen.

    So a 16-bit param beside a master need not be read. A skipped step writes the same bits again.
    """
    (states, writes), (old_states, old_writes) = new, old
    if leaf.kind.is_split and old_states[1].dtype == jnp.int16:
        weight = jnp.where(taken, _moments.join(*states[:2]), _moments.join(*old_states[:2]))
        split = _moments.split(written(weight, platform="tpu"), old_states[1].dtype)
        return (*split, *skips.chosen(taken, states[2:], old_states[2:])), writes
    states = skips.chosen(taken, states, old_states)
    return states, tuple(reference.cast_by_selects(states[0], param.dtype) for param in old_writes)
