"""Linen's layers, nnx's layers and plain functions choose what runs in fp8 by one rule, and warn alike."""

import contextlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp import fp8

RECIPE = fp8.CurrentScaling()
SIDE = 16
NAMES = ("embed", "up", "down", "head")
X = jnp.ones((SIDE, SIDE))


class LinenModel(nn.Module):
    """Layers of these names in a row."""

    names: tuple[str, ...]

    @nn.compact
    def __call__(self, x):
        for name in self.names:
            x = jnp.tanh(nn.Dense(SIDE, use_bias=False, name=name)(x))
        return x


class NnxModel(nnx.Module):
    def __init__(self, names):
        self.names = names
        for name in names:
            setattr(self, name, nnx.Linear(SIDE, SIDE, use_bias=False, rngs=nnx.Rngs(0)))

    def __call__(self, x):
        for name in self.names:
            x = jnp.tanh(getattr(self, name)(x))
        return x


def by_linen(names, recipe, chosen):
    """The layers in fp8, as (name, recipe)."""
    delayed = {pattern: _with_state(part) for pattern, part in _recipes(recipe).items()}
    with fp8.autocast(delayed, filter=chosen):
        params = jax.eval_shape(LinenModel(names).init, jax.random.key(0), X)["params"]
    found = {name: sorted(layer["Fp8DotGeneral_0"]) for name, layer in params.items() if "Fp8DotGeneral_0" in layer}
    return {name: "E4M3" if "fp8_grad_e4m3_log2_scale" in leaves else "HYBRID" for name, leaves in found.items()}


def by_nnx(names, recipe, chosen):
    model = NnxModel(names)
    found = jaxmp.nnx.to_fp8(model, recipe, filter=chosen)
    return {name: getattr(model, name).dot_general.recipe.fp8_format for name in found}


def by_function(names, recipe, chosen):
    def model(params, x):
        for name in names:
            with jax.named_scope(name):
                x = jnp.tanh(x @ params[name])
        return x

    return _in_fp8(model, dict.fromkeys(names, jnp.ones((SIDE, SIDE))), recipe, chosen)


def by_function_of_linen(names, recipe, chosen):
    params = LinenModel(names).init(jax.random.key(0), X)
    return _in_fp8(LinenModel(names).apply, params, recipe, chosen)


def by_function_of_nnx(names, recipe, chosen):
    model = NnxModel(names)
    return _in_fp8(lambda model, x: model(x), model, recipe, chosen)


def _in_fp8(fn, params, recipe, chosen):
    rows = jaxmp.explain_autocast(fn, params, X, dtype=jnp.bfloat16, recipe=recipe, filter=chosen).rows
    in_fp8 = [row for row in rows if row.name == "dot_general" and row.runs_in.startswith("float8")]
    names = [row.module.split("/")[-1] for row in in_fp8]
    by_name = {pattern.strip("*/"): part for pattern, part in _recipes(recipe).items()}
    return {name: by_name.get(name, RECIPE).fp8_format for name in names}


def _recipes(recipe):
    return recipe if isinstance(recipe, dict) else {"*": recipe}


def _with_state(recipe):
    return fp8.DelayedScaling(fp8_format=recipe.fp8_format)


WAYS = {
    "linen": by_linen,
    "nnx": by_nnx,
    "function": by_function,
    "function of linen": by_function_of_linen,
    "function of nnx": by_function_of_nnx,
}
TWO = {"*up": fp8.CurrentScaling(fp8_format="E4M3"), "*": RECIPE}


@pytest.mark.thorough(6)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize(
    ("names", "recipe", "chosen", "expected"),
    [
        (NAMES, RECIPE, None, ["up", "down"]),
        (NAMES, TWO, None, ["up", "down"]),
        (NAMES, RECIPE, ("UP", "/he*"), ["up", "head"]),
        (NAMES, TWO, lambda path, layer: path != "down", ["embed", "up", "head"]),
        (NAMES, RECIPE, (), []),
        (NAMES, {"/up": TWO["*up"], "/*": RECIPE}, "*d*", ["embed", "down", "head"]),
    ],
    ids=["default", "two recipes", "globs", "function", "none", "recipes from the root"],
)
def test_three_ways_choose_alike(way, names, recipe, chosen, expected):
    found = way(names, recipe, chosen)  # without a warning
    assert found == {name: "E4M3" if isinstance(recipe, dict) and name == "up" else "HYBRID" for name in expected}


def test_the_path_of_a_layer_is_that_of_its_params():
    """In a function, too: not the name of a class, of a method or of a transformation, in layers in layers."""

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jnp.tanh(nn.Dense(SIDE, name="up")(x))

        def encode(self, x):
            return self(x)

    class Model(nn.Module):
        def setup(self):
            self.first, self.blocks = nn.Dense(SIDE), [nn.remat(Block)(), Block()]

        def __call__(self, x):
            x = self.blocks[1].encode(self.blocks[0](self.first(x)))
            with jax.named_scope("tied"):
                return x @ self.first.variables["params"]["kernel"].T

    seen: list[str] = []
    params = Model().init(jax.random.key(0), X)
    model = jaxmp.autocast(Model().apply, "fp8", recipe=RECIPE, filter=lambda path, eqn: seen.append(path) is None)
    jax.make_jaxpr(jax.vmap(model, (None, 0)))(params, X[None])
    assert seen == ["first", "blocks_0/up", "blocks_1/up", "tied"]


FUNCTIONS = {"linen": "jaxmp.fp8.autocast", "nnx": "jaxmp.nnx.to_fp8"} | dict.fromkeys(list(WAYS)[2:], "jaxmp.autocast")


@pytest.mark.thorough(5)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(
    ("names", "chosen", "message"),
    [
        (
            ("embed", "head"),
            None,
            r"with weights for fp8 \(((embed: the first|head: the last) operation with weights(; )?){2}\)",
        ),
        (("embed",), None, r"with weights for fp8 \(embed: the last operation with weights\)"),
        (NAMES, lambda path, layer: False, r"with weights for fp8 \((\w+: filter(; )?){4}\)"),
        (NAMES, ("*upp", "down"), r"\(filter=\): the pattern '\*upp' fits no layer. Close to it: 'up'"),
    ],
    ids=["ends", "one", "function", "idle"],
)
def test_three_ways_warn_alike(name, names, chosen, message):
    with pytest.warns(UserWarning, match=rf"{FUNCTIONS[name]}.*{message}") as got:
        WAYS[name](names, RECIPE, chosen)
    assert len(got) == 1


def test_idle_recipes_are_warned_of():
    recipes = {"*upp": RECIPE, "*": RECIPE}
    for name, way in WAYS.items():
        with pytest.warns(UserWarning, match=rf"{FUNCTIONS[name]}\(recipe\): the pattern '\*upp' fits no layer"):
            way(NAMES, recipes, None)


@pytest.mark.parametrize("way", ["function", "region", "jit"])
def test_autocast_of_a_policy_warns_as_fp8_autocast_does(way):
    init = LinenModel(NAMES[:2]).init
    with pytest.warns(UserWarning, match="no-layer-in-fp8") as got, contextlib.ExitStack() as stack:
        if way == "function":
            init = jaxmp.autocast(init, "fp8")
        else:
            stack.enter_context(jaxmp.autocast("fp8"))
        jax.eval_shape(jax.jit(init) if way == "jit" else init, jax.random.key(0), X)
    assert len(got) == 1
    message = r"jaxmp.autocast chose no matmul with weights for fp8 \(embed: the first .*; up: the last .*\)"
    assert re.search(message, str(got[0].message))


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x):
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (2, SIDE, SIDE))
        x = jaxmp.linen.Fp8RaggedDot()(nn.Dense(SIDE)(x), kernel, jnp.array([len(x), 0]))
        return nn.Dense(SIDE)(x)


class Own(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(SIDE)(nn.Dense(SIDE, dot_general_cls=jaxmp.linen.Fp8DotGeneral)(x))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("region", [fp8.autocast, lambda: jaxmp.autocast("fp8")], ids=["fp8", "policy"])
@pytest.mark.parametrize("model", [Experts(), Own()], ids=["experts", "own product"])
def test_a_model_with_a_product_in_fp8_of_its_own_is_not_one_without(model, region):
    with region():  # nothing warns
        jax.eval_shape(model.init, jax.random.key(0), X)


def test_a_policy_of_value_and_grad_leaves_it_to_the_guard():
    """`value_and_grad` says what a policy does not do, once."""
    model = LinenModel(NAMES[:2])
    params = jax.eval_shape(model.init, jax.random.key(0), X)["params"]
    opt_state = jax.eval_shape(jaxmp.mixed_precision(optax.sgd(0.1), "bf16").init, params)
    compute = jaxmp.value_and_grad(lambda params: jnp.mean(model.apply({"params": params}, X)), policy="fp8")
    with pytest.warns(UserWarning, match="nothing-in-fp8") as got:
        jax.eval_shape(lambda params, opt_state: compute(params, opt_state=opt_state), params, opt_state)
    assert len(got) == 1
