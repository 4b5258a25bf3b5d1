"""Passes jaxmp's own extra arguments to the transforms that take them.

`optax.chain` passes all extra arguments to every transform in it that takes extra arguments at all, and drops them for
the others. So a transform with a fixed list of extra arguments (`optax.contrib.sam`) fails on an argument that it does
not know.
"""

from typing import Any

from jaxtyping import PyTree

OWN = ("grads_finite", "loss_scale", "next_loss_scale", "value")


def update(inner: Any, updates: PyTree, state: Any, params: PyTree, extra_args: dict[str, Any]) -> tuple[PyTree, Any]:
    """`inner.update` with those of jaxmp's own extra arguments that it takes, and with all others."""
    while True:
        try:
            return inner.update(updates, state, params, **extra_args)
        except TypeError as e:
            refused = [n for n in OWN if n in extra_args and _is_refused(n, str(e))]
            if not refused:
                raise
            extra_args = {name: x for name, x in extra_args.items() if name not in refused}


def _is_refused(name: str, error: str) -> bool:
    """Whether an error says that a function, or the `value_fn` of optax's line searches, does not take `name`."""
    return f"unexpected keyword argument '{name}'" in error or (
        "not consumed by `value_fn`" in error and f"'{name}'" in error
    )
