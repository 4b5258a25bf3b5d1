"""fp8 layers of flax.nnx: a dot_general for flax's layers, and a function that puts it into an unchanged model."""

import dataclasses
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxmp._src.base import by_identity
from jaxmp._src.fp8 import chosen_layers, convolutions, einsum, layers as layers_lib, matmul
from jaxmp._src.fp8.delayed import DelayedScaling

_DEFAULT = DelayedScaling()


class Fp8Scale(nnx.Param):
    """A scale leaf of an fp8 layer: float32[], a param that the recipe updates, not the optimizer.

    Layers that are stacked for `nnx.scan` or `nnx.vmap` have a stack of leaves.

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
      stack: the first axes of a kernel that holds a stack of layers; the leaves get them, too.
      layer: a name for warnings.

    Example:
      >>> layer = nnx.Linear(16, 32, dot_general=Fp8DotGeneral(), rngs=nnx.Rngs(0))
      >>> sorted(nnx.state(layer, Fp8Scale)["dot_general"])
      ['fp8_grad_e5m2_log2_scale', 'fp8_lhs_e4m3_log2_scale', 'fp8_rhs_e4m3_log2_scale']
    """

    def __init__(
        self,
        recipe: Any = _DEFAULT,
        *,
        rngs: nnx.Rngs | None = None,
        stack: tuple[int, ...] = (),
        layer: str | None = None,
    ):
        self.recipe, self.layer = recipe, layer
        rngs = rngs if recipe.rounds_at_random else None
        self.rngs = nnx.data(None if rngs is None else rngs[layers_lib.ROUNDING].fork())
        for name, start in recipe.leaves().items():
            setattr(self, name, Fp8Scale(jnp.full(stack, start, jnp.float32)))

    def leaves(self) -> list[Array]:
        """The scale leaves, in the order of `jaxmp.fp8.Scales`."""
        return [getattr(self, name).get_value() for name in self.recipe.leaves()]

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
        rhs, bias = (rhs.kernel, rhs.bias) if isinstance(rhs, KernelAndBiasForFp8DotGeneral) else (rhs, None)
        return layers_lib.dot_general(
            self.recipe,
            self.leaves(),
            lhs,
            rhs,
            dimension_numbers,
            preferred_element_type,
            out_sharding,
            bias=bias,
            layer=self.layer,
            key=None if self.rngs is None else self.rngs(),
        )


class Fp8RaggedDot(nnx.Module):
    """`jax.lax.ragged_dot` in fp8 for a mixture of experts in nnx; give each product of a layer its own.

    Args:
      recipe, stack, layer: as for `Fp8DotGeneral`; the recipe is a `DelayedScaling` or `CurrentScaling()`.

    Example:
      >>> rows, experts, sizes = jnp.ones((8, 20)), jnp.ones((3, 20, 32)), jnp.array([5, 0, 3])
      >>> Fp8RaggedDot()(rows, experts, sizes).shape
      (8, 32)
    """

    is_in_fp8: ClassVar[bool] = True  # for autocast

    def __init__(self, recipe: Any = _DEFAULT, **kwargs: Any):
        self.dot_general = Fp8DotGeneral(recipe, **kwargs)

    def __call__(
        self,
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "g k n"],
        group_sizes: Int[Array, "g"],
        preferred_element_type: Any = None,
    ) -> Float[Array, "m n"]:
        """As `jax.lax.ragged_dot`."""
        recipe, leaves = self.dot_general.recipe, self.dot_general.leaves()
        return layers_lib.ragged_dot(recipe, leaves, lhs, rhs, group_sizes, preferred_element_type)


class Fp8Einsum(nnx.Module):
    """An einsum in fp8, which `to_fp8` gives to `nnx.Einsum` as its `einsum_op`.

    An equation that is no single GEMM is computed by `jnp.einsum`, with a `FallbackWarning`.

    Args:
      recipe, rngs, stack, layer: as for `Fp8DotGeneral`.

    Example:
      >>> x, w = jnp.ones((2, 16, 16)), jnp.ones((16, 2, 16))
      >>> Fp8Einsum()("btd,dhk->bthk", x, w).shape
      (2, 16, 2, 16)
    """

    def __init__(self, recipe: Any = _DEFAULT, **kwargs: Any):
        self.dot_general = Fp8DotGeneral(recipe, **kwargs)

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
        """As `jnp.einsum` of two operands; `precision` is not used in fp8."""
        if reason := einsum.why_not_one_gemm(subscripts, lhs.ndim, rhs.ndim):
            dtype = preferred_element_type or matmul.result_dtype(lhs, rhs)
            if layers_lib.is_enabled():
                matmul.warn_of_layer(self.dot_general.layer or "(an Fp8Einsum)", reason)
            operands = lhs.astype(dtype), rhs.astype(dtype)
            named = {"precision": precision, "preferred_element_type": preferred_element_type}
            return jnp.einsum(subscripts, *operands, **named, **kwargs)
        dot = functools.partial(
            self.dot_general, preferred_element_type=preferred_element_type, out_sharding=kwargs.get("out_sharding")
        )
        return einsum.einsum_by(dot, subscripts, lhs, rhs)


class Fp8ConvGeneralDilated(nnx.Module):
    """The convolution of a 1x1 `nnx.Conv` in fp8, as a matmul: `nnx.Conv(..., conv_general_dilated=...)`.

    Strides take pixels away before the matmul.

    Args:
      recipe, stack, layer: as for `Fp8DotGeneral`.

    Raises:
      ValueError: a convolution that is no matmul: a larger kernel, groups, padding or dilation of the input.

    Example:
      >>> layer = nnx.Conv(16, 32, (1, 1), conv_general_dilated=Fp8ConvGeneralDilated(), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 4, 4, 16))).shape
      (1, 4, 4, 32)
    """

    def __init__(self, recipe: Any = _DEFAULT, **kwargs: Any):
        self.dot_general = Fp8DotGeneral(recipe, **kwargs)

    def __call__(
        self, lhs: Float[Array, "..."], rhs: Float[Array, "..."], strides: Any, padding: Any, **kwargs: Any
    ) -> Float[Array, "..."]:
        """As `jax.lax.conv_general_dilated` on images [batch, ..., channels] with a kernel [..., in, out]."""
        pixels, kernel, numbers = convolutions.as_matmul(lhs, rhs, strides, padding, **kwargs)
        return self.dot_general(pixels, kernel, numbers, None, kwargs.get("preferred_element_type"))


@dataclasses.dataclass
class KernelAndBiasForFp8DotGeneral:
    """A kernel, and the bias that the product adds. Another product that gets it raises an error with this name."""

    kernel: Array
    bias: Array


@dataclasses.dataclass(frozen=True)
class _BiasToProduct:
    """The `promote_dtype=` of a layer in fp8 whose product adds the bias; the layer then adds zeros.

    The pass that casts the gradient of the result also sums it, as the gradient of the bias.
    """

    promote: Callable[..., Any]
    is_in_fp8: ClassVar[bool] = True

    def __call__(self, arrays: tuple[Any, Any, Any], **kwargs: Any) -> Any:
        inputs, kernel, promoted = self.promote(arrays, **kwargs)
        if promoted is None:
            return inputs, kernel, promoted
        return inputs, KernelAndBiasForFp8DotGeneral(kernel, arrays[2]), jnp.zeros_like(promoted)


class _Kind(NamedTuple):
    """How a layer of nnx runs in fp8: the attribute that multiplies, what flax puts there, and what does in fp8."""

    attribute: str
    default: Any
    in_fp8: type[Any]


_KINDS = {
    nnx.Linear: _Kind("dot_general", jax.lax.dot_general, Fp8DotGeneral),
    nnx.LinearGeneral: _Kind("dot_general", None, Fp8DotGeneral),
    nnx.Einsum: _Kind("einsum_op", jnp.einsum, Fp8Einsum),
    nnx.Conv: _Kind("conv_general_dilated", jax.lax.conv_general_dilated, Fp8ConvGeneralDilated),
}
_WITH_WEIGHTS = (*_KINDS, nnx.Embed, nnx.ConvTranspose)
_FLAX_PROMOTES = inspect.signature(nnx.Linear.__init__).parameters["promote_dtype"].default


def to_fp8(
    model: nnx.Module, recipe: Any = _DEFAULT, *, filter: chosen_layers.Filter = None, rngs: nnx.Rngs | None = None
) -> list[str]:
    """Puts fp8 into the Linear, LinearGeneral, Einsum and 1x1 Conv layers of a model, in place.

    Call it before `nnx.Optimizer`. Attention's projections are LinearGeneral layers, gates of LSTM and GRU cells are
    Linear layers. Layers with a dot_general or promote_dtype of their own keep it. A stack of layers, as `nnx.vmap`
    makes it for `nnx.scan`, gets a stack of scales; its axes are the first of the kernel.

    Args:
      model: the module.
      recipe: the recipe of these layers, or a dict from patterns of their paths, or of levels
        above, to several; the first that fits counts. Give the same to `jaxmp.mixed_precision`.
      filter: which layers, by `(path, module) -> bool` or patterns; None for all but the first and the last layer with
        weights (embeddings and convolutions count), in the order in which the attributes were set. That may not be the
        order in which they are called: a head that is declared first is called last, and so is an embedding by
        `attend`. Then name the layers here. A stack of layers, or a cell of `nnx.RNN`, is neither first nor last.
      rngs: for `NVFP4()`, which rounds gradients at random: `nnx.Rngs(rounding=seed)`.

    Returns:
      The paths of the layers that now run in fp8.

    Raises:
      ValueError: a stack of layers whose axes are not the first of the kernel.

    Warns:
      FallbackWarning: an Einsum that is no single GEMM; a subclass that does not use what flax's class multiplies by.
      UserWarning: patterns that fit no layer; no layer that runs in fp8, or only some with another recipe, which stays.

    Example:
      >>> model = nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(3)))
      >>> to_fp8(model)
      ['layers/1']
    """
    rule = chosen_layers.Rule("jaxmp.nnx.to_fp8", recipe, filter)
    modules = _modules_in_order(model)
    ends = _ends_of(modules) if filter is None else {}
    layers: list[tuple[str, str | None, bool]] = []
    converted, refused = [], False
    for path, layer in modules:
        kind = _kind_of(layer)
        why_not = "it is no matmul" if kind is None else rule.why_not(path, layer, ends)
        own = _recipe_of(layer)
        if own is not None:
            is_other = why_not is None and own != rule.recipe_at(path)
            why_not = f"it runs in fp8 by {own!r}" + ", which stays; make the model again to change it" * is_other
            refused |= is_other
        elif why_not is None and not _is_plain(layer):
            why_not = "it has a product of its own"
        if isinstance(layer, _WITH_WEIGHTS):
            layers.append((path, why_not, kind is not None))
        if kind is None or why_not is not None:
            continue
        if reason := _why_not(layer, kind):
            matmul.warn_of_layer(path, reason)
            continue
        product = kind.in_fp8(rule.recipe_at(path), rngs=rngs, stack=_stack_of(path, layer), layer=path)
        setattr(layer, kind.attribute, nnx.data(product))
        promote = layers_lib.promotion(layer.promote_dtype, _FLAX_PROMOTES)
        layer.promote_dtype = _BiasToProduct(promote) if _only_adds_its_bias(layer) else promote
        converted.append(path)
    has_own = any(isinstance(module, Fp8DotGeneral) for _, module in modules)
    rule.warn(layers, idle_only=not layers or (has_own and not refused))
    return converted


def _recipe_of(layer: Any) -> Any:
    """The recipe of a layer that runs in fp8, else None."""
    kind = _kind_of(layer)
    product = getattr(layer, kind.attribute) if kind else None
    if isinstance(product, Fp8Einsum | Fp8ConvGeneralDilated):
        product = product.dot_general
    return product.recipe if isinstance(product, Fp8DotGeneral) else None


def _kind_of(layer: Any) -> _Kind | None:
    """How a layer can run in fp8; None if it cannot."""
    if isinstance(layer, nnx.Conv):
        size = (layer.kernel_size,) if isinstance(layer.kernel_size, int) else layer.kernel_size
        options = (layer.padding, layer.input_dilation, layer.feature_group_count)
        return _KINDS[nnx.Conv] if convolutions.is_matmul(size, *options) else None
    return next((kind for cls, kind in _KINDS.items() if isinstance(layer, cls)), None)


def _is_plain(layer: Any) -> bool:
    """Whether a layer has flax's default matmul; a matmul that the user set is kept."""
    kind = _kind_of(layer)
    is_default = kind is not None and getattr(layer, kind.attribute) is kind.default
    return is_default and getattr(layer, "dot_general_cls", None) is None


def _only_adds_its_bias(layer: Any) -> bool:
    """Whether flax's code adds the bias of a layer to its product, and does nothing else with it."""
    return type(layer).__call__ in (nnx.Linear.__call__, nnx.LinearGeneral.__call__) and not getattr(
        layer, "batch_axis", None
    )


def _why_not(layer: Any, kind: _Kind) -> str | None:
    """Why what makes a layer run in fp8 would change nothing; None if it would."""
    if isinstance(layer, nnx.Einsum) and layer.einsum_str is not None:
        ndims = (len(part.replace("...", "")) for part in layer.einsum_str.split("->")[0].split(","))
        if reason := einsum.why_not_one_gemm(layer.einsum_str, *ndims):
            return reason
    names = _names_in(type(layer).__call__)
    if kind.attribute in names or "super" in names or "dot_general_cls" in names:
        return None
    return f"{type(layer).__name__}.__call__ does not use self.{kind.attribute}. Use it there"


def _names_in(function: Any) -> set[str]:
    """The names of globals and attributes in a Python function and those inside it."""
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", function)
    if not isinstance(code, types.CodeType):
        return set()
    return set(code.co_names).union(*map(_names_in, code.co_consts))


def _ends_of(modules: list[tuple[str, Any]]) -> dict[str, str]:
    """The first and the last layer with weights, in the order in which the attributes were set."""
    loops = [f"{path}/" if path else "" for path, module in modules if isinstance(module, nnx.RNN)]
    return chosen_layers.ends(
        (path, bool(_stack_of(path, layer)) or any(path.startswith(loop) for loop in loops))
        for path, layer in modules
        if isinstance(layer, _WITH_WEIGHTS)
    )


def _stack_of(path: str, layer: Any) -> tuple[int, ...]:
    """The first axes of a kernel that is a stack of kernels."""
    if isinstance(layer, nnx.Linear):
        own = (layer.in_features, layer.out_features)
    elif isinstance(layer, nnx.LinearGeneral):
        own = (*layer.batch_axis.values(), *layer.in_features, *layer.out_features)
    elif isinstance(layer, nnx.Einsum):
        own = tuple(layer.kernel_shape)
    elif isinstance(layer, nnx.Embed):
        own = (layer.num_embeddings, layer.features)
    else:
        own = tuple(layer.kernel_shape)
    shape = (layer.embedding if isinstance(layer, nnx.Embed) else layer.kernel).get_value().shape
    stack = shape[: len(shape) - len(own)]
    if stack and shape != (*stack, *own):  # kernel and scales are cut alike
        raise ValueError(
            f"a stack of fp8 layers must have its axes first; got the kernel of {path} with shape {shape}, of layers "
            f"with {own}. Use nnx.vmap with out_axes=0."
        )
    return stack


def _modules_in_order(model: nnx.Module) -> list[tuple[str, Any]]:
    """Paths and modules of `model` and below, in the order in which attributes were set, each module once."""
    seen = by_identity.ByIdentity()
    modules: list[tuple[str, Any]] = []

    def walk(node: Any, path: tuple[str, ...]) -> None:
        if isinstance(node, nnx.Module):
            if seen.get(node):
                return
            seen.set(node, True)
            modules.append(("/".join(path), node))
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
    return modules
