"""fp8 layers of flax.nnx: a dot_general for flax's layers, and a function that puts it into an unchanged model."""

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from jaxmp._src.fp8 import einsum, layers as layers_lib, recipes

_DEFAULT = recipes.DelayedScaling()


class Fp8Scale(nnx.Param):
    """A scale leaf of an fp8 layer: float32[], a param that the recipe updates, not the optimizer.

    Example:
      >>> isinstance(Fp8DotGeneral().fp8_lhs_e4m3_log2_scale, nnx.Param)
      True
    """


class Fp8DotGeneral(nnx.Module):
    """A dot_general in fp8 for nnx layers: `nnx.Linear(..., dot_general=jaxmp.nnx.Fp8DotGeneral())`.

    Each layer needs its own (layers that share one have one set of scales, with amaxes combined by MAX). With
    `promote_dtype=jaxmp.fp8.promote_all_but_kernel` the layer casts its float32 kernel directly to fp8, and the
    kernel's gradient is float32.

    Args:
      recipe: a `DelayedScaling` or a stateless recipe; give the same to `jaxmp.mixed_precision`.
      rngs: for `NVFP4()`, which rounds gradients at random: `nnx.Rngs(rounding=seed)`.

    Example:
      >>> layer = nnx.Linear(16, 32, dot_general=Fp8DotGeneral(), rngs=nnx.Rngs(0))
      >>> sorted(nnx.state(layer, Fp8Scale)["dot_general"])
      ['fp8_grad_e5m2_log2_scale', 'fp8_lhs_e4m3_log2_scale', 'fp8_rhs_e4m3_log2_scale']
    """

    def __init__(self, recipe: Any = _DEFAULT, *, rngs: nnx.Rngs | None = None):
        self.recipe = recipe
        rngs = rngs if layers_lib.rounds_at_random(recipe) else None
        self.rngs = nnx.data(None if rngs is None else rngs[layers_lib.ROUNDING].fork())
        for name, start in layers_lib.leaves_of(recipe).items():
            setattr(self, name, Fp8Scale(jnp.full((), start, jnp.float32)))

    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
    ) -> Float[Array, "..."]:
        """As `jax.lax.dot_general`; `precision` is not used."""
        del precision
        leaves = [getattr(self, name).get_value() for name in layers_lib.leaves_of(self.recipe)]
        return layers_lib.dot_general(
            self.recipe,
            leaves,
            lhs,
            rhs,
            dimension_numbers,
            preferred_element_type,
            out_sharding,
            key=None if self.rngs is None else self.rngs(),
        )


class Fp8Einsum(nnx.Module):
    """An einsum in fp8 for `nnx.Einsum(..., einsum_op=jaxmp.nnx.Fp8Einsum())`.

    Args:
      recipe, rngs: as for `Fp8DotGeneral`.

    Example:
      >>> x, w = jnp.ones((2, 16, 16)), jnp.ones((16, 2, 16))
      >>> Fp8Einsum()("btd,dhk->bthk", x, w).shape
      (2, 16, 2, 16)
    """

    def __init__(self, recipe: Any = _DEFAULT, *, rngs: nnx.Rngs | None = None):
        self.dot_general = Fp8DotGeneral(recipe, rngs=rngs)

    def __call__(
        self,
        subscripts: str,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        *,
        precision: Any = None,
        preferred_element_type: Any = None,
        **kwargs: Any,
    ) -> Float[Array, "..."]:
        """As `jnp.einsum` of two operands; `precision` is not used."""
        del precision

        dot = functools.partial(
            self.dot_general, preferred_element_type=preferred_element_type, out_sharding=kwargs.get("out_sharding")
        )
        return einsum.einsum_by(dot, subscripts, lhs, rhs)


_CONVERTED = (nnx.Linear, nnx.LinearGeneral, nnx.Einsum)
_WITH_WEIGHTS = (*_CONVERTED, nnx.Embed, nnx.Conv, nnx.ConvTranspose)


def to_fp8(
    model: nnx.Module, recipe: Any = _DEFAULT, *, filter: layers_lib.Filter = None, rngs: nnx.Rngs | None = None
) -> list[str]:
    """Puts fp8 into the Linear, LinearGeneral and Einsum layers of a model, in place; call it before `nnx.Optimizer`.

    Attention's projections are LinearGeneral layers. Layers with a dot_general of their own keep it.

    Args:
      model: the module.
      recipe: the recipe of these layers, or a dict from patterns of their paths, or of levels
        above, to several; the first that fits counts. Give the same to `jaxmp.mixed_precision`.
      filter: which layers, by `(path, module) -> bool` or patterns; None for all but the first and the last layer with
        weights (embeddings and convolutions count), in the order in which the model's attributes were set.
      rngs: for `NVFP4()`, which rounds gradients at random: `nnx.Rngs(rounding=seed)`.

    Returns:
      The paths of the layers that now run in fp8.

    Warns:
      UserWarning: patterns that fit no layer; no layer was turned to fp8.

    Example:
      >>> model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3)))
      >>> to_fp8(model)
      ['layers/1']
    """
    layers_lib.check_recipe(recipe)
    modules = _modules_in_order(model)
    layers = [(path, layer) for path, layer in modules if isinstance(layer, _WITH_WEIGHTS)]
    could_run = [path for path, layer in layers if isinstance(layer, _CONVERTED)]
    warned = layers_lib.warn_of_idle("jaxmp.nnx.to_fp8", recipe, filter, could_run)
    ends = {id(layers[0][1]), id(layers[-1][1])} if layers and filter is None else set()
    converted = []
    for path, layer in layers:
        layer: Any
        if id(layer) in ends or not _is_plain(layer) or not layers_lib.wants_fp8(path, layer, filter):
            continue
        is_einsum = isinstance(layer, nnx.Einsum)
        own = layers_lib.recipe_at(recipe, path)
        product = nnx.data((Fp8Einsum if is_einsum else Fp8DotGeneral)(own, rngs=rngs))
        setattr(layer, "einsum_op" if is_einsum else "dot_general", product)
        layer.promote_dtype = layers_lib.promote_all_but_kernel
        converted.append(path)
    if not converted and layers and not warned and not any(isinstance(x, Fp8DotGeneral) for _, x in modules):
        reason = "they are the first and the last" if filter is None else "the filter chooses none"
        warnings.warn(
            f"no layer was turned to fp8: {reason}. Paths of layers look like {layers[0][0]!r}; choose by filter=.",
            stacklevel=2,
        )
    return converted


def _is_plain(layer: Any) -> bool:
    """Whether a layer has flax's default matmul; a matmul that the user set is kept."""
    if isinstance(layer, nnx.Linear):
        return layer.dot_general is jax.lax.dot_general
    if isinstance(layer, nnx.LinearGeneral):
        return layer.dot_general is None and layer.dot_general_cls is None
    return isinstance(layer, nnx.Einsum) and layer.einsum_op is jnp.einsum


def _modules_in_order(model: nnx.Module) -> list[tuple[str, Any]]:
    """Paths and modules of `model` and below, in the order in which attributes were set, each module once."""
    seen: set[int] = set()
    found: list[tuple[str, Any]] = []

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if id(node) in seen:
            return
        seen.add(id(node))
        if isinstance(node, nnx.Module):
            found.append(("/".join(path), node))
        if isinstance(node, nnx.Variable) or not isinstance(node, (nnx.Module, list, tuple, dict)):
            return
        if isinstance(node, dict):
            children: Any = node.items()
        elif isinstance(node, (list, tuple, nnx.List)):
            children = enumerate(node)
        else:
            children = vars(node).items()
        for name, child in children:
            if not str(name).startswith("_pytree__"):
                walk(child, (*path, str(name)))

    walk(model, ())
    return found
