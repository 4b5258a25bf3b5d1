"""fp8 layers of flax.linen: a dot_general for flax's layers, and a context that puts it into an unchanged model."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.fp8 import einsum, layers, recipes, scale_leaves, stored_kernels
from jaxmp._src.fp8.recipes import DelayedScaling


class Fp8DotGeneral(nn.Module):
    """A dot_general in fp8 for flax layers: `nn.Dense(..., dot_general_cls=jaxmp.linen.Fp8DotGeneral)`.

    Its scale leaves lie in "params", beside the kernel. For another recipe use
    `dot_general_cls=functools.partial(jaxmp.linen.Fp8DotGeneral, recipe=recipe)`, and give the same recipe to
    `jaxmp.mixed_precision`. With `promote_dtype=jaxmp.fp8.promote_all_but_kernel` the layer casts its float32 kernel
    directly to fp8, and the kernel's gradient is float32.

    Attributes:
      recipe: a `DelayedScaling` or a stateless recipe. `NVFP4()` rounds gradients at random: give the model's apply
        `rngs={"rounding": key}`, with a new key for each step.

    Example:
      >>> layer = nn.Dense(32, dot_general_cls=Fp8DotGeneral)
      >>> params = layer.init(jax.random.key(0), jnp.ones((16, 16)))["params"]
      >>> sorted(params["Fp8DotGeneral_0"])
      ['fp8_grad_e5m2_log2_scale', 'fp8_lhs_e4m3_log2_scale', 'fp8_rhs_e4m3_log2_scale']
    """

    recipe: Any = recipes.DelayedScaling()

    @nn.compact
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
        try:
            leaves = [self.param(name, filled, start) for name, start in layers.leaves_of(self.recipe).items()]
        except flax.errors.ScopeParamNotFoundError as e:
            e.add_note(
                f"jaxmp: the fp8 layer {'/'.join(self.path)} finds no scales in the params. Initialize the model as it "
                f"is applied: under jaxmp.fp8.autocast with the same recipe and filter, or jaxmp.autocast of the same "
                f"policy. Weights that were trained without fp8 get scales by merging them into the params of such an "
                f"init."
            )
            raise
        draws = layers.rounds_at_random(self.recipe) and self.has_rng(layers.ROUNDING)
        key = self.make_rng(layers.ROUNDING) if draws else None
        with layers.switched(layers.is_enabled() and not self.is_initializing()):  # init often has a batch of one
            return layers.dot_general(
                self.recipe,
                leaves,
                lhs,
                rhs,
                dimension_numbers,
                preferred_element_type,
                out_sharding,
                layer="/".join(self.path[:-1]),
                key=key,
            )


class Fp8Einsum(nn.Einsum):
    """`nn.Einsum` in fp8, with the same params and scale leaves beside them.

    Attributes:
      recipe: a `DelayedScaling` or a stateless recipe.

    Example:
      >>> layer = Fp8Einsum((16, 2, 16), "btd,dhk->bthk", use_bias=False)
      >>> sorted(layer.init(jax.random.key(0), jnp.ones((1, 16, 16)))["params"])
      ['Fp8DotGeneral_0', 'kernel']
    """

    recipe: Any = recipes.DelayedScaling()
    is_in_fp8: ClassVar[bool] = True  # for autocast

    @nn.compact
    def __call__(self, inputs: Float[Array, "..."], einsum_str: str | None = None) -> Float[Array, "..."]:
        """As `nn.Einsum`."""
        subscripts = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.use_bias:
            shape, broadcast = self._get_bias_shape(subscripts, inputs, kernel)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        inputs, kernel, bias = layers.promote_all_but_kernel(inputs, kernel, bias, dtype=self.dtype)
        dot = Fp8DotGeneral(self.recipe)
        y = einsum.einsum_by(dot, subscripts, inputs, kernel)
        return y if bias is None else y + jnp.reshape(bias, broadcast)


_CONVERTED = (nn.Dense, nn.DenseGeneral, nn.Einsum)
_WITH_WEIGHTS = (*_CONVERTED, nn.Embed, nn.Conv, nn.ConvTranspose)


class _Interceptor:
    """What flax calls in place of each method of a module inside `autocast`."""

    def __init__(self, recipe: Any, chosen: layers.Filter):
        self.recipe, self.chosen = recipe, chosen
        self.by_default: Callable[[str], bool] | None = None  # of the model that is running
        self.is_running = False
        self.has_run = False  # a whole model, from its __call__
        self.seen: dict[str, None] = {}  # paths of layers that could run in fp8

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        if not hasattr(type(module), method):  # a function by which nn.remat wraps a module, whose own call follows
            return next_fun(*args, **kwargs)
        if ambient.now().fp8_layers is not self or module.scope is None:
            return next_fun(*args, **kwargs)
        if not self.is_running and not module.path:  # the whole model is called
            if self.chosen is None and layers.is_enabled():
                self.by_default = _default_of(module, method, args, kwargs)
            self.is_running = True
            try:
                out = self(next_fun, args, kwargs, context)
            finally:
                self.by_default, self.is_running = None, False
            self.has_run |= method == "__call__"
            return out
        if method != "__call__" or not isinstance(module, _CONVERTED):
            return next_fun(*args, **kwargs)
        path = "/".join(module.path)
        if layers.is_enabled():
            self.seen[path] = None
        if not _is_plain(module):
            return next_fun(*args, **kwargs)
        if not layers.is_enabled():  # a kernel that is stored in fp8 still needs its scale
            stored = _recipe_of_stored(module)
            return _in_fp8(module, stored)(*args, **kwargs) if stored else next_fun(*args, **kwargs)
        if not (self.by_default(path) if self.by_default else layers.wants_fp8(path, module, self.chosen)):
            return next_fun(*args, **kwargs)
        return _in_fp8(module, layers.recipe_at(self.recipe, path))(*args, **kwargs)


def _default_of(module: nn.Module, method: str, args: Any, kwargs: Any) -> Callable[[str], bool]:
    """Which layers of a model run in fp8 without a filter, by path."""
    leaves = jax.tree_util.tree_leaves_with_path(module.variables.get("params", {}))
    scales = [path for path, _ in leaves if scale_leaves.is_scale(path)]
    if scales and not module.is_initializing():  # a method may call only some layers, which have another first and last
        held = {tree_paths.path_str(path).rpartition("/")[0].rpartition("/")[0] for path in scales}
        return held.__contains__
    ends = _ends_of(module, method, args, kwargs)
    return lambda path: path not in ends


def _ends_of(module: nn.Module, method: str, args: Any, kwargs: Any) -> set[str]:
    """Paths of the first and the last layer with weights that a model calls, found by an abstract run."""
    order: list[str] = []

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        if isinstance(context.module, _WITH_WEIGHTS) and context.method_name == "__call__":
            order.append("/".join(context.module.path))
        return next_fun(*args, **kwargs)

    fresh = module.clone(parent=None)
    names = {"params", "dropout", *(module.scope.rngs if module.scope is not None else ())}
    rngs = {name: jax.random.key(0) for name in names}
    with layers.switched(False), nn.intercept_methods(note):
        jax.eval_shape(lambda: fresh.init(rngs, *args, method=method, **kwargs))
    return {order[0], order[-1]} if order else set()


def _recipe_of_stored(module: Any) -> Any:
    """A recipe for the scales of a layer with a kernel stored in fp8; None for other layers."""
    params = module.variables.get("params", {})
    if not stored_kernels.is_stored(params.get("kernel")):
        return None
    in_e4m3 = any("grad_e4m3" in name for name in params.get("Fp8DotGeneral_0", {}))
    return recipes.DelayedScaling(fp8_format="E4M3" if in_e4m3 else "HYBRID")


def _is_plain(module: Any) -> bool:
    """Whether a layer has flax's default matmul; a matmul that the user set is kept."""
    if isinstance(module, nn.Einsum):
        return not isinstance(module, Fp8Einsum)
    return module.dot_general is None and module.dot_general_cls is None


def _in_fp8(module: Any, recipe: Any) -> Any:
    """The same layer, in the same scope, in fp8."""
    scope: Any = module.scope
    if isinstance(module, nn.Einsum):
        fields = {
            f.name: getattr(module, f.name) for f in dataclasses.fields(nn.Einsum) if f.name not in ("parent", "name")
        }
        return Fp8Einsum(**fields, recipe=recipe, parent=scope)
    return module.clone(
        parent=scope,
        dot_general_cls=functools.partial(Fp8DotGeneral, recipe=recipe),
        promote_dtype=layers.promote_all_but_kernel,
    )


def filled(key: Array, value: float) -> Float[Array, ""]:
    """The initializer of a scale leaf."""
    del key
    return jnp.full((), value, jnp.float32)


@contextlib.contextmanager
def autocast(recipe: Any = None, *, enabled: bool = True, filter: layers.Filter = None) -> Iterator[None]:
    """A region in which linen's Dense, DenseGeneral and Einsum layers run in fp8, or in which no layer does.

    Enter it both where the model is initialized (the layers get their scale leaves there) and where the loss is
    computed: inside the jitted function, or around the call that traces it. Attention's projections are DenseGeneral
    layers. A layer with a dot_general of its own keeps it. With `enabled=False`, layers that hold fp8
    dot_generals (of linen and nnx) run in the dtype of their inputs. The innermost region counts.

    Args:
      recipe: the recipe of these layers, default `DelayedScaling()`, or a dict from patterns of
        their paths, or of levels above, to several; the first that fits counts. Give the same to
        `jaxmp.mixed_precision`.
      enabled: False switches fp8 off.
      filter: which layers, by `(path, module) -> bool` or patterns such as `("*mlp*",)`; None for all but the first
        and the last layer with weights (embeddings and convolutions count), in the order in which they are called;
        once there are params with scale leaves, for the layers that hold them.

    Warns:
      UserWarning: at the end of a region in which a whole model was called, patterns that fit no layer.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(16)])
      >>> with autocast():
      ...     params = model.init(jax.random.key(0), jnp.ones((16, 16)))["params"]
      >>> [name for name, layer in params.items() if "Fp8DotGeneral_0" in layer]
      ['layers_2']
    """
    recipe = DelayedScaling() if recipe is None else recipe
    layers.check_recipe(recipe)
    interceptor = _Interceptor(recipe, filter)
    with (
        layers.switched(enabled),
        ambient.having(fp8_layers=interceptor),
        nn.intercept_methods(interceptor),
    ):
        yield
    if interceptor.has_run:  # a method of a model may call some layers only
        layers.warn_of_idle("jaxmp.fp8.autocast", recipe, filter, list(interceptor.seen), stacklevel=3)
