"""Layers of flax and float32: which ones a policy keeps in it, and the warning about those that only ask for it.

float32 is the default of `dtype=` in many models (`dtype: Any = jnp.float32`, handed to every layer), so under autocast
it is no request: such a layer runs by the lists, as a layer with `dtype=None` does, and as in torch. A policy keeps a
layer in float32 by `keep_fp32`, the patterns that name its params: a module whose params all fit runs as it was
written, and not in fp8. Where nobody has said which layers stay float32, a warning tells of those with `dtype=float32`
that compute in 16 bits.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from flax.core import meta

from jaxmp._src.autocast.cast_lists import CastLists
from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.base.warn import warn
from jaxmp._src.programs.flax_modules import ModuleCall

_SHOWN = 5  # layers in a warning


def is_kept(call: ModuleCall, lists: CastLists) -> bool:
    """Whether the policy of `lists` names every param of the called module and of those below it."""
    if lists.keeps is None:
        return False
    params = jax.tree_util.tree_leaves_with_path(_params_of(call.module))
    return lists.keeps(call.path, (tree_paths.path_str(path) for path, _ in params))


def note(call: ModuleCall, lists: CastLists) -> None:
    """Notes a layer with `dtype=float32` and a weight of its own whose matmul runs in 16 bits by `lists`."""
    found = ambient.now().autocast_float32_layers
    if found is None or lists.dtype is None or not lists.tells_of_float32 or not _asks_for_float32(call.module):
        return
    is_lookup = isinstance(call.module, linen.Embed | nnx.Embed) and call.method != "attend"
    if not is_lookup and call.method != "setup" and any(np.ndim(x) > 1 for x in _own_params_of(call.module)):
        found[call.path or type(call.module).__name__] = None


@contextlib.contextmanager
def told_of() -> Iterator[None]:
    """Collects such layers while functions are traced inside, and tells of them at the end: once, where these nest."""
    if ambient.now().autocast_float32_layers is not None:
        yield
        return
    found: dict[str, None] = {}
    with ambient.having(autocast_float32_layers=found):
        yield
    if found:
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        warn(
            "float32-layers-in-16-bits",
            f"dtype=float32 of a layer is no request under autocast, as it is the default of many models; got layers "
            f"with it that compute in 16 bits, or in fp8: {', '.join(list(found)[:_SHOWN])}{more}. To keep layers in "
            f'float32, name their params, jaxmp.get_policy(..., keep_fp32=("head/*",)), or call them in '
            f"`with jaxmp.autocast(enabled=False):`. If none has to stay, say keep_fp32=(). (autocast of a dtype takes "
            f'modules={{"head": jnp.float32}}, or modules={{}}.)',
        )


def _asks_for_float32(module: Any) -> bool:
    given = getattr(module, "dtype", None)
    try:
        return given is not None and jnp.dtype(given) == jnp.float32
    except TypeError:
        return False


def _params_of(module: Any) -> Any:
    """The params of a module and of those below it: arrays, perhaps in boxes."""
    if isinstance(module, linen.Module):
        return module.variables.get("params", {})
    return nnx.as_pure(nnx.state(module, nnx.Param)) if isinstance(module, nnx.Module) else {}


def _own_params_of(module: Any) -> list[Any]:
    """The params that a module itself holds."""
    if isinstance(module, linen.Module):
        return [x for x in map(meta.unbox, _params_of(module).values()) if hasattr(x, "ndim")]
    if isinstance(module, nnx.Module):
        return [x.get_value() for x in vars(module).values() if isinstance(x, nnx.Param)]
    return []
