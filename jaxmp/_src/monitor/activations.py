"""Statistics of the output of each module of a model, without a change to the model.

`programs/taps.py` rewrites the traced loss function so that it computes statistics at the output of each module. The
function returns them with the loss, as auxiliary data. Nothing is sent to the host, and the gradients do not change by
a bit.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool

from jaxmp._src.base.tree_paths import Patterns
from jaxmp._src.base.warn import warn
from jaxmp._src.devices import collectives
from jaxmp._src.monitor import tensor_stats
from jaxmp._src.monitor.tensor_stats import LeafCounts, TensorStats
from jaxmp._src.programs import taps

_FILTER = "watch_activations(filter=)"


def watch_activations(
    fn: Callable[..., Any],
    *,
    filter: str | Sequence[str] | Callable[[str], bool] | None = None,
    when: bool | Bool[Array, ""] = True,
    histogram: bool = False,
    axis_name: collectives.AxisName = "auto",
) -> Callable[..., tuple[Any, TensorStats | None]]:
    """Makes `fn` also return statistics of the output of each module in it.

        watched = jaxmp.monitor.watch_activations(loss_fn, when=look)     # look: a static argument of the step
        (loss, activations), grads = jaxmp.value_and_grad(watched, has_aux=True)(params, batch, opt_state=opt_state)
        stats = jaxmp.monitor.step_stats(grads, opt_state, params, activations=activations, when=look)

    Modules are: linen modules, by the path of their params; nnx modules that are arguments of `fn`; and named scopes
    (`with jax.named_scope("attention"):`), which you can put around any value. The output of a module is the last value
    that is computed in it and used outside. If a module is called more than once, its last call counts. Modules inside
    `cond`, `while`, `shard_map` or a function with a custom derivative are not seen. Over the layers of a `scan`, and
    over microbatches, extremes are combined by MAX or MIN and shares are averaged.

    Args:
      fn: any function of pytrees. If it returns `(loss, aux)`, the new function returns `((loss, aux), stats)`; for
        `value_and_grad`, wrap it in a function that returns `(loss, (aux, stats))`.
      filter: which modules: path globs such as `("*attention*",)`, or a function of the path; None for all.
      when: whether to compute statistics, as for `tensor_stats`. With Python's False, `fn` runs unchanged and None is
        returned; as a static argument of a jitted step, this costs nothing in the other steps. A traced bool becomes a
        condition in the middle of the forward pass, and XLA then fuses less in every step.
      histogram: whether to compute `TensorStats.octaves`.
      axis_name: as for `tensor_stats`.

    Returns:
      A function of the same arguments that returns `(result of fn, TensorStats)`, with names in the order of
      computation.

    Raises:
      TypeError: `fn` is not a function, or `when` is not a bool.

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
        raise TypeError(f"fn must be a function; got {type(fn).__name__}. Pass loss_fn itself, not its result.")
    when = tensor_stats.checked_when(when)

    @functools.wraps(fn)
    def watched(*args: Any, **kwargs: Any) -> tuple[Any, TensorStats | None]:
        if when is False:
            return fn(*args, **kwargs), None
        tensors: dict[str, tuple[Any, int]] = {}  # in the order of computation; jax sorts the keys of `found`

        def measure(path: str, x: Array) -> LeafCounts | None:
            if not jnp.issubdtype(x.dtype, jnp.floating) or not x.size:
                return None
            tensors[path] = x.dtype, x.size
            return tensor_stats.sampled(lambda: tensor_stats.of_leaf(x, histogram=histogram), when)

        patterns = Patterns(_FILTER, () if filter is None or callable(filter) else filter, of="module")

        def fits(path: str) -> bool:
            return patterns.first(path) is not None

        wanted = filter if filter is None or callable(filter) else fits
        out, tapped = taps.collect(fn, measure, wanted)(*args, **kwargs)
        warned = patterns.warn_of_idle()
        if filter is not None and not tensors and not warned:
            warn(
                "pattern-fits-nothing",
                f"{_FILTER}: {filter!r} chooses no module; leave it out to see all.",
            )

        def over_iterations(path: str) -> LeafCounts:
            """The counts of a module that ran in a scan, which have a leading axis, as those of one tensor."""
            ranks, extremes = tapped[path]
            ranks = jnp.sum(ranks.reshape(-1, ranks.shape[-1]), axis=0, dtype=ranks.dtype)
            return ranks, jnp.max(extremes.reshape(-1, extremes.shape[-1]), axis=0)

        def assemble() -> TensorStats:
            counts = [over_iterations(path) for path in tensors]
            return tensor_stats.assemble(tensors, counts, histogram, axis_name)

        return out, tensor_stats.sampled(assemble, when)

    return watched
