"""Which code a `with jaxmp.autocast(...)` reaches, and the warning of a region that reached nothing.

JAX has no hook for every operation, so a region affects only code that jaxmp can intercept: methods of linen and haiku
modules, and functions that jaxmp itself calls or has wrapped. An nnx or equinox module, or a plain `x @ w`, would run
in float32 without a warning.

Each of these hooks marks the regions in which it runs. A region that ends without a mark changed nothing, with one
exception: it may have called a function that `jax.jit` had traced before. jit traces again for other lists, so the
earlier trace was in a region with the same lists, and that region was marked.
"""

import contextlib
from collections.abc import Iterator

from jaxmp._src.autocast import regions
from jaxmp._src.autocast.cast_lists import CastLists
from jaxmp._src.base import ambient
from jaxmp._src.base.warn import warn


class Region:
    """A region that a user entered.

    Attributes:
      lists: what it says.
      around: the region around it, or None.
      is_reached: whether something in it ran by the lists of a region.
    """

    def __init__(self, lists: CastLists, around: "Region | None"):
        self.lists = lists
        self.around = around
        self.is_reached = False


@contextlib.contextmanager
def entered(lists: CastLists) -> Iterator[Region]:
    """Notes what is reached inside."""
    region = Region(lists, ambient.now().autocast_region)
    with ambient.having(autocast_region=region):
        yield region


def mark() -> None:
    """Called where jaxmp runs, or traces, something by the lists of the regions around it."""
    now = ambient.now()
    region = now.autocast_region
    while region is not None:
        region.is_reached = True
        now.autocast_reached.add(region.lists)
        region = region.around


def warn_if_idle(region: Region) -> None:
    """Warns if nothing in a region can have run by its lists. One inside of another leaves that to the outermost."""
    dtype = region.lists.dtype
    is_reached = region.is_reached or regions.is_tracing() or region.lists in ambient.now().autocast_reached
    if dtype is None or is_reached or region.around is not None:
        return
    name = dtype.name
    warn(
        "autocast-reached-nothing",
        f"a region of autocast reaches linen and haiku modules, and losses of jaxmp.value_and_grad; got a `with "
        f"jaxmp.autocast(...)` for {name} in which none ran. Write jaxmp.autocast(model, jnp.{name})(x).",
    )
