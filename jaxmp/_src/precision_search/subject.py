"""The model that `suggest_policy` measures: its loss as a function of params, and the places of its matmuls."""

import inspect
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.fp8 import chosen_layers, linen_layers, matmul, nnx_layers, scale_leaves
from jaxmp._src.fp8.recipes import CurrentScaling
from jaxmp._src.numerics import casting
from jaxmp._src.programs import taps

_JITTED = type(jax.jit(lambda: None))


class Gemm(NamedTuple):
    """A matmul of the model.

    Attributes:
      site: its place.
      module: path of its module, or of its named scope outside modules.
      weight: which operand is the weight.
      param: path of the weight if it is a param.
      is_data: whether the other operand is an argument but no param: training does not compute its gradient.
      why_not_fp8: why it cannot run in fp8; "" if it can.
    """

    site: taps.Site
    module: str
    weight: int
    param: str | None
    is_data: bool
    why_not_fp8: str


def _arguments(batch: Any) -> tuple[Any, ...]:
    """The arguments of the loss behind the first: a tuple holds them all, another tree of arrays is the only one."""
    if isinstance(batch, tuple | list) and not hasattr(batch, "_fields"):  # a NamedTuple is one tree
        return tuple(batch)
    if not jax.tree.leaves(batch):
        raise TypeError(
            f"suggest_policy: batch must be a tuple of the loss's other arguments, or its only one, a tree of arrays; "
            f"got {batch!r}. Without any, pass ()."
        )
    return (batch,)


class Subject:
    """The model: a loss function with params, or an nnx module with a loss function."""

    def __init__(self, model: Any, batch: Any, params: PyTree, loss_fn: Any, has_aux: bool):
        self.is_nnx = isinstance(model, nnx.Module)
        self._model, self.has_aux = model, has_aux
        self.given_loss_fn: Any = loss_fn if self.is_nnx else model
        self._loss_fn = self.given_loss_fn
        if isinstance(self._loss_fn, _JITTED):  # a jitted function is not traced again
            self._loss_fn = inspect.unwrap(self._loss_fn, stop=lambda fn: not isinstance(fn, _JITTED))
        if self.is_nnx and loss_fn is None:
            raise ValueError("suggest_policy: an nnx module needs loss_fn=, a function `loss_fn(model, *batch)`")
        if not self.is_nnx and params is None:
            raise ValueError("suggest_policy: a loss function needs params=, its first argument")
        if self.is_nnx:
            self._graphdef, variables, self._rest = nnx.split(model, nnx.Param, ...)
            params = nnx.as_pure(variables)
        scales = [path for path in tree_paths.leaves_by_path(params) if scale_leaves.is_scale(path)]
        if scales:
            raise ValueError(
                f"suggest_policy measures a model that is written for float32; {scales[0]} is an fp8 scale. Initialize "
                f"it outside jaxmp.fp8.autocast, without Fp8DotGeneral."
            )
        self.params = casting.cast_floats(params, jnp.float32)
        self.given_batch = _arguments(batch)
        self.batch = casting.cast_floats(self.given_batch, jnp.float32)
        self.gemms = self._find_gemms()
        if not self.gemms:
            raise ValueError(
                "suggest_policy: no matmul or convolution of floats was found in the loss function; those in cond, "
                "while, shard_map and functions with their own derivatives are not searched"
            )

    def new_model(self) -> nnx.Module:
        """A copy of the nnx module, with float32 params."""
        return nnx.merge(self._graphdef, self.params, self._rest, copy=True)

    def loss(self, hook: taps.Replace) -> Callable[..., Any]:
        """The loss as a function of params and batch, with a hook at its matmuls."""
        tapped = taps.replace_matmuls(self._loss_fn, hook)

        def loss(params: PyTree, batch: Any) -> Array:
            first = nnx.merge(self._graphdef, params, self._rest, copy=True) if self.is_nnx else params
            out = tapped(first, *batch)
            return (out[0] if self.has_aux else out).astype(jnp.float32)

        return loss

    def hooked(self, change: Callable[[int, Any, list[Any]], Array]) -> Callable[..., Any]:
        """The loss with `change(number of the matmul, run, operands)` in place of each."""
        number = {gemm.site.key: i for i, gemm in enumerate(self.gemms)}

        def hook(site: taps.Site, run: Any, operands: list[Any]) -> Array:
            return change(number[site.key], run, operands) if site.key in number else run(*operands)

        return self.loss(hook)

    def _find_gemms(self) -> list[Gemm]:
        sites: dict[Any, taps.Site] = {}
        layers: set[str] = set()

        def hook(site: taps.Site, run: Any, operands: list[Any]) -> Array:
            if all(jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*site.eqn.invars, *site.eqn.outvars)):
                sites[site.key] = site
            return run(*operands)

        def note(path: str, layer: Any) -> bool:
            del layer
            layers.add(path)
            return False

        # It calls the filter for each layer of linen that could run in fp8.
        rule = chosen_layers.Rule("jaxmp.suggest_policy", CurrentScaling(), note)
        with linen_layers.region(rule, enabled=True, idle_only=True):
            jax.eval_shape(self.loss(hook), self.params, self.batch)
        if self.is_nnx:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # "no layer was turned to fp8"
                nnx_layers.to_fp8(self._model, CurrentScaling(), filter=note)
        return [self._gemm(sites[key], layers) for key in sorted(sites)]

    def _gemm(self, site: taps.Site, layers: set[str]) -> Gemm:
        module = site.path if site.module is None else site.module
        root = "0/0/" if self.is_nnx else "0/"
        params = [o.removeprefix(root) if o is not None and o.startswith(root) else None for o in site.origins]
        weight = 0 if params[0] is not None and params[1] is None else 1
        why = ""
        if module not in layers:
            why = "is no Dense, DenseGeneral, Einsum or 1x1 Conv layer"
        elif params[weight] is None:
            why = "one of its matmuls has no weight"
        else:
            why = matmul.why_not_fp8(site.eqn.params["dimension_numbers"]) or ""
        other = site.origins[1 - weight]
        is_data = other is not None and not f"{other}/".startswith(root)
        return Gemm(site, module, weight, params[weight], is_data, why)
