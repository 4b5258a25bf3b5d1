"""fp8 layers of flax.linen: a dot_general for flax's layers, and a context that puts it into an unchanged model."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, ClassVar

import flax.errors
import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int

from jaxmp._src.base import ambient, tree_paths
from jaxmp._src.fp8 import chosen_layers, convolutions, einsum, layers, matmul, scale_leaves
from jaxmp._src.fp8.delayed import DelayedScaling
from jaxmp._src.programs import jaxprs, module_paths


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

    recipe: Any = DelayedScaling()

    @nn.compact
    def __call__(
        self,
        lhs: Float[Array, "..."],
        rhs: Float[Array, "..."],
        dimension_numbers: Any,
        precision: Any = None,
        preferred_element_type: Any = None,
        out_sharding: Any = None,
        bias: Float[Array, "..."] | None = None,
    ) -> Float[Array, "..."]:
        """As `jax.lax.dot_general`; `precision` is not used. For `bias` see `jaxmp.fp8.dot_general`."""
        del precision
        return _product(self, lhs, rhs, dimension_numbers, preferred_element_type, out_sharding, bias)


class Fp8ConvGeneralDilated(nn.Module):
    """The convolution of a 1x1 `nn.Conv` in fp8, as a matmul: `nn.Conv(8, (1, 1), conv_general_dilated_cls=...)`.

    Strides take pixels away before the matmul. Its scale leaves lie in "params", beside the kernel.

    Attributes:
      recipe: a `DelayedScaling` or a stateless recipe.

    Raises:
      ValueError: a convolution that is no matmul: a larger kernel, groups, padding or dilation of the input.

    Example:
      >>> layer = nn.Conv(32, (1, 1), strides=2, conv_general_dilated_cls=Fp8ConvGeneralDilated)
      >>> params = layer.init(jax.random.key(0), jnp.ones((1, 4, 4, 16)))["params"]
      >>> sorted(params), layer.apply({"params": params}, jnp.ones((1, 4, 4, 16))).shape
      (['Fp8ConvGeneralDilated_0', 'bias', 'kernel'], (1, 2, 2, 32))
    """

    recipe: Any = DelayedScaling()

    @nn.compact
    def __call__(
        self, lhs: Float[Array, "..."], rhs: Float[Array, "..."], strides: Any, padding: Any, **kwargs: Any
    ) -> Float[Array, "..."]:
        """As `jax.lax.conv_general_dilated` on images [batch, ..., channels] with a kernel [..., in, out]."""
        pixels, kernel, numbers = convolutions.as_matmul(lhs, rhs, strides, padding, **kwargs)
        return _product(self, pixels, kernel, numbers, kwargs.get("preferred_element_type"), None)


class Fp8RaggedDot(nn.Module):
    """`jax.lax.ragged_dot` in fp8 for a mixture of experts in linen; its scale leaves lie in "params".

    Give each product of a layer its own. Under `jaxmp.fp8.autocast(enabled=False)` it runs in the dtype of the rows.

    Attributes:
      recipe: a `DelayedScaling` or `CurrentScaling()`; give the same to `jaxmp.mixed_precision`.

    Example:
      >>> class Experts(nn.Module):
      ...     @nn.compact
      ...     def __call__(self, rows, group_sizes):
      ...         kernel = self.param("kernel", nn.initializers.lecun_normal(), (3, rows.shape[-1], 32))
      ...         return Fp8RaggedDot()(rows, kernel, group_sizes)
      >>> rows, sizes = jnp.ones((8, 20)), jnp.array([5, 0, 3])
      >>> params = Experts().init(jax.random.key(0), rows, sizes)["params"]
      >>> sorted(params), Experts().apply({"params": params}, rows, sizes).shape
      (['Fp8RaggedDot_0', 'kernel'], (8, 32))
    """

    recipe: Any = DelayedScaling()
    is_in_fp8: ClassVar[bool] = True  # for autocast

    @nn.compact
    def __call__(
        self,
        lhs: Float[Array, "m k"],
        rhs: Float[Array, "g k n"],
        group_sizes: Int[Array, "g"],
        preferred_element_type: Any = None,
    ) -> Float[Array, "m n"]:
        """As `jax.lax.ragged_dot`."""
        leaves = leaves_of(self)
        return layers.ragged_dot(self.recipe, leaves, lhs, rhs, group_sizes, preferred_element_type)


class Fp8Einsum(nn.Einsum):
    """`nn.Einsum` in fp8, with the same params and scale leaves beside them.

    With flax's own `promote_dtype`, the kernel goes to fp8 as it is stored (see `promote_all_but_kernel`). An equation
    that is no single GEMM runs as in `nn.Einsum`, without scale leaves, and warns (`FallbackWarning`).

    Attributes:
      recipe: a `DelayedScaling` or a stateless recipe.

    Example:
      >>> layer = Fp8Einsum((16, 2, 16), "btd,dhk->bthk", use_bias=False)
      >>> sorted(layer.init(jax.random.key(0), jnp.ones((1, 16, 16)))["params"])
      ['Fp8DotGeneral_0', 'kernel']
    """

    recipe: Any = DelayedScaling()
    is_in_fp8: ClassVar[bool] = True  # for autocast

    @nn.compact
    def __call__(self, inputs: Float[Array, "..."], einsum_str: str | None = None) -> Float[Array, "..."]:
        """As `nn.Einsum`."""
        subscripts = nn.merge_param("einsum_str", self.einsum_str, einsum_str).replace(" ", "")
        reason = einsum.why_not_one_gemm(subscripts, jnp.ndim(inputs), len(self.shape))
        if reason:
            matmul.warn_of_layer("/".join(self.path), reason)
            return nn.Einsum.__call__(self, inputs, None if einsum_str is None else subscripts)
        kernel = self.param("kernel", self.kernel_init, self.shape, self.param_dtype)
        bias = None
        if self.use_bias:
            shape, broadcast = self._get_bias_shape(subscripts, inputs, kernel)
            bias = self.param("bias", self.bias_init, shape, self.param_dtype)
        promote = layers.promotion(self.promote_dtype, _FLAX_PROMOTES)
        inputs, kernel, bias = promote(inputs, kernel, bias, dtype=self.dtype)
        dot = functools.partial(Fp8DotGeneral(self.recipe), preferred_element_type=self.preferred_element_type)
        y = einsum.einsum_by(dot, subscripts, inputs, kernel)
        return y if bias is None else y + jnp.reshape(bias, broadcast)


def _product(
    module: nn.Module, lhs: Any, rhs: Any, numbers: Any, dtype: Any, out_sharding: Any, bias: Array | None = None
) -> Array:
    """The product with the scale leaves of `module`, which lies in the layer."""
    recipe: Any = module.recipe  # pyright: ignore[reportAttributeAccessIssue]
    leaves, key = leaves_of(module), rounding_key(module)
    with layers.switched(layers.is_enabled() and not module.is_initializing()):
        layer = "/".join(module.path[:-1])
        return layers.dot_general(
            recipe, leaves, lhs, rhs, numbers, dtype, out_sharding, bias=bias, layer=layer, key=key
        )


def rounding_key(module: Any) -> Array | None:
    """A key for stochastic rounding by the recipe of `module`; None if it needs none, or was given no such stream."""
    draws = module.recipe.rounds_at_random and module.has_rng(layers.ROUNDING)
    return module.make_rng(layers.ROUNDING) if draws else None


def leaves_of(module: Any) -> list[Array]:
    """The scale leaves of `module`, by its recipe."""
    try:
        return [module.param(name, _filled, start) for name, start in module.recipe.leaves().items()]
    except flax.errors.ScopeParamNotFoundError as e:
        e.add_note(
            f"jaxmp: the fp8 layer {'/'.join(module.path)} finds no scales in the params. Call model.init as the model "
            f"is applied, under the same jaxmp.fp8.autocast or jaxmp.autocast, and merge trained weights into it."
        )
        raise


_FLAX_PROMOTES = nn.Dense(1).promote_dtype
_BASES = (nn.Dense, nn.DenseGeneral, nn.Einsum, nn.Conv)  # their calls are one matmul each
_WITH_WEIGHTS = (*_BASES, nn.Embed, nn.ConvTranspose, nn.OptimizedLSTMCell)
_MARK = "jaxmp.fp8.layer:"

# The region, as a part of the key under which `jax.jit` caches a trace.
_KEY = jax.make_user_context(None)


class _Interceptor:
    """What flax calls in place of each method of a module inside `autocast`."""

    def __init__(self, rule: chosen_layers.Rule):
        self.rule = rule
        self.is_highest = jaxprs.default_is_highest()  # around the region
        self.ends: Mapping[str, str] = {}  # of the model that is running
        self.holders: Collection[str] | None = None  # the layers of this model that hold scales, if they are known
        self.is_running = False
        self.has_run = False  # a whole model, from its __call__
        self.seen: dict[str, tuple[str | None, bool]] = {}  # why a layer does not run in fp8, and whether it can
        self.base_calls = 0  # of layers, by the class of flax that multiplies
        self.has_fp8 = False  # a matmul with scales, of any layer: experts and products of its own count

    def __call__(self, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        module, method = context.module, context.method_name
        if not hasattr(type(module), method):  # a function by which nn.remat wraps a module, whose own call follows
            return next_fun(*args, **kwargs)
        if ambient.now().fp8_layers is not self or module.scope is None:
            return next_fun(*args, **kwargs)
        if not self.is_running and not module.path:  # the whole model is called
            if self.rule.filter is None and layers.is_enabled():
                self.holders = _holders_of_scales(module)
                self.ends = _ends_of(module, method, args, kwargs) if self.holders is None else {}
            self.is_running = True
            notes = ambient.now().notes
            before = notes.fp8_matmuls
            try:
                out = self(next_fun, args, kwargs, context)
            finally:
                self.ends, self.holders, self.is_running = {}, None, False
            self.has_run |= method == "__call__"
            self.has_fp8 |= notes.fp8_matmuls > before
            return out
        if method != "__call__":
            return next_fun(*args, **kwargs)
        if isinstance(module, nn.OptimizedLSTMCell) and self._wants_gates(module):
            return _as(nn.LSTMCell, module)(*args, **kwargs)
        path = "/".join(module.path)
        base = next((cls for cls in _BASES if isinstance(module, cls)), None)
        can = base is not None and (base is not nn.Conv or _is_one_matmul(module))
        if layers.is_enabled() and isinstance(module, _WITH_WEIGHTS):
            self.seen[path] = (None if can else "it is no matmul", can)
        if base is None or not can or not _is_plain(module):
            return next_fun(*args, **kwargs)
        if context.orig_method.func is not base.__call__.__wrapped__:
            return self._call_of_a_subclass(base, path, module, next_fun, args, kwargs)
        self.base_calls += 1
        if not layers.is_enabled() or not self._wants(path, module):
            return next_fun(*args, **kwargs)
        return _in_fp8(base, module, self.rule.recipe_at(path))(*args, **kwargs)

    def _wants(self, path: str, module: Any) -> bool:
        params = ["kernel", "bias"] if getattr(module, "use_bias", False) else ["kernel"]
        why_not = self.rule.why_not(path, module, self.ends, params=params)
        if self.holders is not None and path not in self.holders:
            why_not = "it holds no scales"
        if path in self.seen:
            self.seen[path] = (why_not, True)
        return why_not is None

    def _wants_gates(self, cell: nn.Module) -> bool:
        """Whether a cell whose params are those of `nn.LSTMCell` runs as one: a Dense layer for each gate."""
        if any(scale_leaves.is_scale(path) for path, _ in jax.tree_util.tree_leaves_with_path(cell.variables)):
            return True
        names = ["/".join((*cell.path, side + gate)) for side in "ih" for gate in "ifgo"]
        return layers.is_enabled() and any(self._wants(path, cell) for path in names)

    def _call_of_a_subclass(self, base: Any, path: str, module: Any, next_fun: Any, args: Any, kwargs: Any) -> Any:
        """A `__call__` of its own: what it computes by calling that of flax's class runs in fp8."""
        before = self.base_calls
        out = next_fun(*args, **kwargs)
        if self.base_calls == before and layers.is_enabled() and self._wants(path, module):
            reason = (
                f"{type(module).__name__}.__call__ does not call nn.{base.__name__}.__call__. Call it there, or use "
                f"jaxmp.linen.Fp8DotGeneral() in it"
            )
            matmul.warn_of_layer(path, reason)
        return out


def _holders_of_scales(module: nn.Module) -> set[str] | None:
    """Paths of the layers that hold scales: a method may call only some layers, which have another first and last.

    None in a model without scales, or that is being initialized.
    """
    leaves = jax.tree_util.tree_leaves_with_path(module.variables.get("params", {}))
    scales = [tree_paths.path_str(path) for path, _ in leaves if scale_leaves.is_scale(path)]
    if not scales or module.is_initializing():
        return None
    return {path.rpartition("/")[0].rpartition("/")[0] for path in scales}


def _ends_of(module: nn.Module, method: str, args: Any, kwargs: Any) -> dict[str, str]:
    """The first and the last layer with weights that a model calls, found by an abstract run.

    An embedding may be the last one, by `attend`.
    """

    def note(next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
        out = next_fun(*args, **kwargs)
        called = context.method_name == "__call__" or (
            isinstance(context.module, nn.Embed) and context.method_name == "attend"
        )
        if not called or not isinstance(context.module, _WITH_WEIGHTS):
            return out
        name = _MARK + "/".join(context.module.path)
        return jax.tree.map(lambda x: checkpoint_name(x, name), out)

    fresh = module.clone(parent=None)
    names = {"params", "dropout", *(module.scope.rngs if module.scope is not None else ())}
    rngs = {name: jax.random.key(0) for name in names}
    with layers.switched(False), nn.intercept_methods(note):
        closed = jax.make_jaxpr(lambda: fresh.init(rngs, *args, method=method, **kwargs))()
    return chosen_layers.ends(_marks(jaxprs.open_jaxpr(closed)[0], in_loop=False))


def _marks(jaxpr: Any, *, in_loop: bool) -> Iterator[tuple[str, bool]]:
    """(path, whether it is in a loop) of the layers in a jaxpr, in the order in which they run."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK):
            yield eqn.params["name"].removeprefix(_MARK), in_loop
        for inner in jaxprs.functions_of(eqn):
            yield from _marks(inner.jaxpr, in_loop=in_loop or eqn.primitive.name in jaxprs.LOOPS)


def _is_plain(module: Any) -> bool:
    """Whether a layer has flax's default matmul; a matmul that the user set is kept."""
    if isinstance(module, nn.Einsum):
        return not isinstance(module, Fp8Einsum)
    if isinstance(module, nn.Conv):
        return module.conv_general_dilated is None and module.conv_general_dilated_cls is None
    return module.dot_general is None and module.dot_general_cls is None


def _is_one_matmul(conv: Any) -> bool:
    """Whether a convolution is a matmul at each pixel."""
    size = (conv.kernel_size,) if isinstance(conv.kernel_size, int) else conv.kernel_size
    return convolutions.is_matmul(size, conv.padding, conv.input_dilation, conv.feature_group_count)


def _in_fp8(base: Any, module: Any, recipe: Any) -> Callable[..., Array]:
    """The call of flax's class `base` on a layer, in the same scope, in fp8."""
    if base is nn.Einsum:
        return _as(Fp8Einsum, module, recipe=recipe)
    cls, field = Fp8DotGeneral, "dot_general_cls"
    if base is nn.Conv:
        cls, field = Fp8ConvGeneralDilated, "conv_general_dilated_cls"
    promote = layers.promotion(module.promote_dtype, _FLAX_PROMOTES)
    fields = {"promote_dtype": promote, field: functools.partial(cls, recipe=recipe)}
    bias = _bias_of(base, module)
    if bias is not None:  # the product adds it
        fields |= {"use_bias": False, field: lambda: functools.partial(cls(recipe=recipe), bias=bias)}
    return functools.partial(base.__call__, module.clone(parent=module.scope, **fields))  # of a subclass, too


def _bias_of(base: Any, module: Any) -> Array | None:
    """The bias of a layer whose product adds it; None for a layer without one, or that adds it itself."""
    adds_itself = base is nn.Conv or module.promote_dtype is not _FLAX_PROMOTES or getattr(module, "batch_dims", ())
    if module.is_initializing() or not module.use_bias or adds_itself:
        return None
    return nn.meta.unbox(module.get_variable("params", "bias"))


def _as(cls: Any, module: Any, **fields: Any) -> Any:
    """A module of another class with the same attributes, in the same scope."""
    own = {f.name for f in dataclasses.fields(cls)} - {"parent", "name"}
    own_fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if f.name in own}
    return cls(**own_fields, **fields, parent=module.scope)


def _filled(key: Array, value: float) -> Float[Array, ""]:
    """The initializer of a scale leaf."""
    del key
    return jnp.full((), value, jnp.float32)


@contextlib.contextmanager
def autocast(recipe: Any = None, *, enabled: bool = True, filter: chosen_layers.Filter = None) -> Iterator[None]:
    """A region in which linen's Dense, DenseGeneral, Einsum and 1x1 Conv layers run in fp8, or in which no layer does.

    Enter it both where the model is initialized (the layers get their scale leaves there) and where the loss is
    computed: inside the jitted function, or around each of its calls (`jax.jit` traces anew for another region).
    Attention's projections are DenseGeneral layers, gates of LSTM and GRU cells are Dense layers. A layer with a
    dot_general or promote_dtype of its own keeps it, and what a subclass adds to the call of flax's class stays. With
    `enabled=False`, layers that hold fp8 dot_generals (of linen and nnx) run in the dtype of their inputs. The
    innermost region counts.

    Args:
      recipe: the recipe of these layers, default `DelayedScaling()`, or a dict from patterns of
        their paths, or of levels above, to several; the first that fits counts. Give the same to
        `jaxmp.mixed_precision`.
      enabled: False switches fp8 off.
      filter: which layers, by `(path, module) -> bool` or patterns such as `("*mlp*",)`; None for all but the first
        and the last layer with weights (embeddings and convolutions count, an embedding also where it is the output
        layer, by `attend`), in the order in which they are called; a layer in a scan is neither first nor last. Once
        there are params with scale leaves, for the layers that hold them.

    Warns:
      FallbackWarning: an Einsum that is no single GEMM; a subclass that does not call the class of flax.
      UserWarning: at the end of a region in which a whole model was called, patterns that fit no layer, or no layer
        that runs in fp8.

    Example:
      >>> import flax.linen as nn, jax, jax.numpy as jnp
      >>> model = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(32), nn.relu, nn.Dense(16)])
      >>> with autocast():
      ...     params = jax.jit(model.init)(jax.random.key(0), jnp.ones((16, 16)))["params"]
      >>> [name for name, layer in params.items() if "Fp8DotGeneral_0" in layer]
      ['layers_2']
    """
    rule = chosen_layers.Rule("jaxmp.fp8.autocast", DelayedScaling() if recipe is None else recipe, filter)
    with region(rule, enabled=enabled, idle_only=False):
        yield


@contextlib.contextmanager
def region(rule: chosen_layers.Rule, *, enabled: bool, idle_only: bool) -> Iterator[None]:
    """`autocast` by a rule; `idle_only`: something else says that no layer runs in fp8."""
    interceptor = _Interceptor(rule)
    with (
        module_paths.fp8_region(enabled) if ambient.AUTOCAST.value[1] else contextlib.nullcontext(),
        layers.switched(enabled),
        ambient.having(fp8_layers=interceptor),
        nn.intercept_methods(interceptor),
        _KEY(rule),
    ):
        yield
    if interceptor.has_run and interceptor.seen:  # a method of a model may call some layers only
        asked_layers = ((path, *seen) for path, seen in interceptor.seen.items())
        rule.warn(asked_layers, idle_only=idle_only or interceptor.has_fp8)
