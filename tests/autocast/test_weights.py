"""Which matmuls of any function run in fp8: those by an input, moved or cast. What a function computes is no weight."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from matmul_dtypes import matmuls

RECIPE = jaxmp.fp8.CurrentScaling()
EVERY = "*"  # a filter that takes the first and the last product, too
FP8 = "float8_e4m3fn"  # in forward products
SIDE = 32
RNG = np.random.default_rng(0)
W, M, B, C = RNG.normal(size=(4, SIDE, SIDE)).astype(np.float32) / 6
X = RNG.normal(size=(48, SIDE)).astype(np.float32)
PARAMS = jax.tree.map(jnp.asarray, {"first": C, "last": B, "w": W, "m": M, "stack": np.stack([W, M])})


def inner(weight):
    """A function whose second of three matmuls is by what `weight` makes of its params and what came before."""

    def loss(params, x):
        h = jnp.tanh(x @ params["first"])
        h = jnp.tanh(h @ weight(params, h))
        return jnp.mean((h @ params["last"][: h.shape[1]]) ** 2)

    return loss


WEIGHTS = {
    "itself": lambda p, h: p["w"],
    "transposed": lambda p, h: p["w"].T,
    "cast": lambda p, h: p["w"].astype(jnp.bfloat16),
    "a part": lambda p, h: p["stack"][1],
    "parts": lambda p, h: jnp.concatenate([p["w"][:16], p["m"][16:]]),
    "without a gradient": lambda p, h: lax.stop_gradient(p["w"]),
    "in jit": lambda p, h: jax.jit(lambda w: w.reshape(SIDE, SIDE).T)(p["w"]),
    "closed over": lambda p, h: M,
}
COMPUTED = {
    "masked": lambda p, h: p["w"] * (p["m"] > 0),
    "LoRA": lambda p, h: p["w"] + p["m"] @ p["m"],
    "a product of two": lambda p, h: p["w"] @ p["m"],
    "scores": lambda p, h: (h @ p["w"]).T[:, :SIDE],
    "a loop over data": lambda p, h: lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c @ p["m"]), h).T[:, :SIDE],
}


@pytest.mark.parametrize("name", WEIGHTS)
def test_an_input_moved_or_cast_is_a_weight(name):
    run = jaxmp.autocast(inner(WEIGHTS[name]), "fp8", recipe=RECIPE)
    assert matmuls(run, PARAMS, X) == {"bfloat16": 2, FP8: 1}  # all but the first and the last


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", COMPUTED)
def test_what_a_function_computes_stays_in_16_bits_and_is_listed(name):
    loss = inner(COMPUTED[name])
    assert matmuls(jaxmp.autocast(loss, "fp8", recipe=RECIPE, filter=EVERY), PARAMS, X)["bfloat16"] >= 1
    rows = jaxmp.explain_autocast(loss, PARAMS, X, dtype="fp8", recipe=RECIPE, filter=EVERY).rows
    assert "allow, not fp8: the function computes both operands" in {row.group for row in rows}


def test_layers_in_a_scan_train_all_their_parts():
    """A stack of layers with adapters whose products stay in 16 bits: the gradients are those of float32."""
    stack = {"w": jnp.stack([W] * 3), "a": jnp.stack([C[:, :16]] * 3), "b": jnp.stack([B[:16]] * 3)}

    def loss(stack, x):
        body = lambda h, p: (jnp.tanh(h @ p["w"] + (h @ p["a"]) @ p["b"]), None)  # noqa: E731
        return jnp.mean(lax.scan(jax.checkpoint(body), x, stack)[0] ** 2)

    run = jaxmp.autocast(loss, "fp8", recipe=RECIPE)
    assert matmuls(run, stack, X)[FP8] == 3
    gradients, exact = jax.jit(lambda stack: (jax.grad(run)(stack, X), jax.grad(loss)(stack, X)))(stack)
    for name, value in exact.items():
        assert np.linalg.norm(gradients[name] - value) <= 0.2 * np.linalg.norm(value)


def test_a_layer_in_a_loop_over_data():
    """Other transformations: tests/step/test_fp8_products.py."""
    layer = lambda w, x: lax.scan(lambda c, row: (c, jnp.tanh(row[None] @ w)[0]), 0, x)[1]  # noqa: E731
    assert matmuls(jaxmp.autocast(layer, "fp8", recipe=RECIPE, filter=EVERY), W, X[:2]) == {FP8: 1}


def test_of_two_inputs_the_second_is_the_weight():
    for fn in (lambda p, x: x @ p["w"], lambda p, x: p["w"] @ x.T):
        assert matmuls(jaxmp.autocast(fn, "fp8", recipe=RECIPE, filter=EVERY), PARAMS, X) == {FP8: 1}


def test_rows_say_why_other_products_are_left():
    def loss(params, x):
        h = jnp.tanh(x @ params["first"]) @ (params["w"] + params["m"])
        h = lax.ragged_dot(h, params["stack"], jnp.array([20, 28]))
        image, kernel = h[:16].reshape(1, 4, 4, SIDE), params["w"][None, None]
        image = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(image) + jnp.mean(h @ params["last"])

    with pytest.warns(UserWarning, match="chose no matmul with weights for fp8"):
        rows = jaxmp.explain_autocast(loss, PARAMS, X, dtype="fp8", recipe=RECIPE).rows
    groups = {row.group for row in rows}
    for why in ("computes both operands", "call jaxmp.fp8.ragged_dot", "it is a convolution", "the last operation"):
        assert any(why in group for group in groups), (why, groups)
