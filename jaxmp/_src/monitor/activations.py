"""Statistics of what each module of a model returns, without a change to the model.

The loss function is walked as it is traced (`_tapped`), and at the output of each module one pass looks at it. Its
numbers come out beside the loss, as auxiliary data do: nothing is sent to the host, and gradients are the same bits.
"""

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import collectives
from jaxmp._src.monitor import tensor_stats
from jaxmp._src.monitor.tensor_stats import Seen, TensorStats
from jaxmp._src.programs import taps


def watch_activations(
    fn: Callable[..., Any],
    *,
    filter: Sequence[str] | Callable[[str], bool] | None = None,
    when: bool | Bool[Array, ""] = True,
    histogram: bool = False,
    axis_name: collectives.AxisName = "auto",
) -> Callable[..., tuple[Any, TensorStats | None]]:
    """`fn`, with statistics of what each module in it returns.

        watched = jaxmp.monitor.watch_activations(loss_fn, when=look)     # look: a static argument of the step
        (loss, activations), grads = jaxmp.value_and_grad(watched, has_aux=True)(params, batch, opt_state=opt_state)
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, activations=activations, when=look)

    Modules are those of linen, by the path of their params; nnx modules that are arguments of `fn`; and named scopes
    (`with jax.named_scope("attention"):`), which tap any value. The value of a module is the last that is computed in
    it and used outside; in a module that is called more than once, in its last call. What runs inside of `cond`,
    `while`, `shard_map` or a function with a derivative of its own is not seen. Inside of a `scan` over layers, and
    over microbatches, extremes are taken and shares averaged.

    Args:
      fn: any function of pytrees; one with auxiliary data returns `((loss, aux), stats)`, which a function round it
        turns into `(loss, (aux, stats))` for `value_and_grad`.
      filter: which modules, by path globs such as `("*attention*",)` or a function of the path; None for all.
      when: whether to look, as for `tensor_stats`. For Python's False `fn` runs as it is, and None comes back: with a
        static argument the steps that are not looked at cost nothing. A traced value is a condition in the middle of
        the forward pass, which keeps XLA from fusing what it fuses otherwise, in every step.
      histogram: whether to keep the octaves.
      axis_name: as for `tensor_stats`.

    Returns:
      A function of the same arguments that returns `(what fn returns, stats)`, names in the order of computation.

    Raises:
      TypeError: `fn` is no function, or `when` no bool.

    Example:
      >>> import flax.linen as nn, jax
      >>> model = nn.Sequential([nn.Dense(4), nn.relu, nn.Dense(1)])
      >>> x = jnp.ones((2, 3))
      >>> variables = model.init(jax.random.key(0), x)
      >>> out, stats = watch_activations(model.apply)(variables, x)
      >>> stats.names, stats.dtypes
      (('layers_0', 'layers_2'), ('float32', 'float32'))
    """

    if not callable(fn):
        raise TypeError(f"watch_activations takes the function itself, loss_fn, not what it returns; got {type(fn)}")
    when = tensor_stats.checked_when(when)

    @functools.wraps(fn)
    def watched(*args: Any, **kwargs: Any) -> tuple[Any, TensorStats | None]:
        if when is False:
            return fn(*args, **kwargs), None
        tensors: dict[str, tuple[Any, int]] = {}  # in the order of computation, which dicts that jax makes have not

        def look(path: str, x: Array) -> Seen | None:
            if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
                return None
            tensors[path] = x.dtype, x.size
            return tensor_stats.sampled(lambda: tensor_stats.of_leaf(x, histogram=histogram), when)

        out, found = taps.collect(fn, look, _is_wanted(filter))(*args, **kwargs)
        if filter is not None and not tensors:
            warnings.warn(
                f"watch_activations(filter={filter!r}) matches no module; leave it out to see all", stacklevel=2
            )

        def assemble() -> TensorStats:
            seen = [_over_iterations(found[path]) for path in tensors]
            return tensor_stats.assemble(tensors, seen, histogram, axis_name)

        return out, tensor_stats.sampled(assemble, when)

    return watched


def _is_wanted(filter: Sequence[str] | Callable[[str], bool] | None) -> Callable[[str], bool] | None:
    if filter is None or callable(filter):
        return filter
    patterns = (filter,) if isinstance(filter, str) else tuple(filter)
    return lambda path: tree_paths.matches(path, patterns)


def _over_iterations(seen: Seen) -> Seen:
    ranks, extremes = seen
    ranks = jnp.sum(ranks.reshape(-1, ranks.shape[-1]), axis=0, dtype=ranks.dtype)
    return ranks, jnp.max(extremes.reshape(-1, extremes.shape[-1]), axis=0)
