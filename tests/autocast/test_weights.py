"""Which operand of a matmul is a weight: inputs, and what a function makes of inputs alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmp
from matmul_dtypes import matmuls

RECIPE = jaxmp.fp8.CurrentScaling()
FORWARD = "float8_e4m3fn"
SIDE = 32
KEYS = jax.random.split(jax.random.key(0), 8)
W, M, B, C = (jax.random.normal(KEYS[i], (SIDE, SIDE)) / 6 for i in range(4))
A1, B1 = jax.random.normal(KEYS[4], (SIDE, 16)) / 6, jax.random.normal(KEYS[5], (16, SIDE)) / 6
X = jax.random.normal(KEYS[6], (48, SIDE))
G = jnp.ones(SIDE)


def in_fp8(fn):
    return jaxmp.autocast(fn, "fp8", recipe=RECIPE)


def inner(weight):
    """A function whose second of three matmuls is by what `weight` makes of its params."""

    def loss(params, x):
        h = jnp.tanh(x @ params["first"])
        h = jnp.tanh(h @ weight(params))
        return jnp.mean((h @ params["last"]) ** 2)

    return loss


WEIGHTS = {
    "mask": lambda p: p["w"] * (p["m"] > 0),
    "where": lambda p: jnp.where(p["m"] > 0, p["w"], 0.0),
    "sum": lambda p: p["w"] + p["m"],
    "scaled": lambda p: 0.5 * p["w"].T,
    "tanh": lambda p: jnp.tanh(p["w"]),
    "weight norm": lambda p: p["w"] * (p["g"] / jnp.linalg.norm(p["w"], axis=0))[None],
    "standardized": lambda p: p["w"] - jnp.mean(p["w"], axis=0, keepdims=True),
    "LoRA": lambda p: p["w"] + p["a"] @ p["b"],
    "LoRA, scaled": lambda p: lax.stop_gradient(p["w"]) + 2.0 * (p["a"] @ p["b"]),
    "LoRA of a transposed": lambda p: (p["w"] + (p["a"] @ p["b"]).T).T,
    "two LoRAs": lambda p: (p["w"] + p["a"] @ p["b"]) + p["a2"] @ p["b2"],
    "in jit": lambda p: jax.jit(lambda w, a, b: w + a @ b)(p["w"], p["a"], p["b"]),
    "dropped": lambda p: p["w"] * jax.random.bernoulli(p["key"], 0.5, (SIDE, SIDE)),
    "stack": lambda p: (p["stack"] * 2.0)[1],
    "cumsum": lambda p: jnp.cumsum(p["w"], axis=0) / 4,
    "mask by a median": lambda p: p["w"] * (jnp.abs(p["w"]) > jnp.median(jnp.abs(p["w"]))),
    "qr": lambda p: jnp.linalg.qr(p["w"])[0],
    "cond": lambda p: lax.cond(p["g"][0] > 0, lambda w: w * 2.0, lambda w: w, p["w"]),
    "divided by a computed number": lambda p: p["w"] / (1.0 + jnp.abs(p["g"] @ (p["w"] @ p["g"]))),
    "a product of two": lambda p: p["a"] @ p["b"],
    "a product of two, moved": lambda p: 0.5 * (p["b"].T @ p["a"].T).T,
    "a product of three": lambda p: p["w"] @ p["m"] @ p["w"],
}
PARAMS = {"first": C, "last": B, "w": W, "m": M, "g": G, "a": A1, "b": B1, "a2": -A1, "b2": B1[::-1]}
PARAMS |= {"key": jax.random.key(7), "stack": jnp.stack([W, M]), "memory": X.reshape(2, 24, SIDE)}
PRODUCTS = {"two LoRAs": 2, "LoRA": 1, "in jit": 1, "of two": 1, "of three": 2}  # in 16 bits


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", WEIGHTS)
def test_weights_that_are_made_inside(name):
    """The matmul by it runs in fp8, the products that make it do not; its gradient is that of its parts."""
    loss = inner(WEIGHTS[name])
    found = matmuls(in_fp8(loss), PARAMS, X)
    assert found[FORWARD] == 1 + (name == "divided by a computed number")  # W @ g is one, too
    assert found.get("bfloat16", 0) == 2 + next((count for part, count in PRODUCTS.items() if part in name), 0)
    floats = {k: v for k, v in PARAMS.items() if k != "key"}
    got, expected = (
        jax.jit(jax.grad(lambda p, f=f: f({**p, "key": PARAMS["key"]}, X)))(floats) for f in (in_fp8(loss), loss)
    )
    for key, value in expected.items():
        assert np.linalg.norm(got[key] - value) <= 0.2 * np.linalg.norm(value)


COMPUTED = {
    "scores": lambda p, h: (h @ p["w"]).T,
    "a mask of data": lambda p, h: p["w"] * (h[:SIDE] > 0),
    "a residual": lambda p, h: (h + h @ p["w"]).T,
    "a bias": lambda p, h: (jnp.tanh(h) @ p["w"] + p["g"][None]).T,
    "a product of what the other depends on": lambda p, h: p["first"] @ p["w"],
    "a product of data with three axes": lambda p, h: (p["memory"] @ p["w"]).reshape(48, SIDE).T,
    "a layer of an input": lambda p, h: jnp.tanh(p["m"] @ p["w"]),
    "positions": lambda p, h: (h @ p["w"] + jnp.tile(p["g"][None], (48, 1))).T,
    "a loop over data": lambda p, h: lax.scan(lambda c, _: (jnp.tanh(c @ p["m"]), None), h, None, length=2)[0].T,
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_no_weight(name):
    """Products with data inside stay in 16 bits, and the rows say why."""

    def loss(params, x):
        h = jnp.tanh(x @ params["first"])
        return jnp.mean((h @ COMPUTED[name](params, h)) ** 2)

    options = {"dtype": "fp8", "recipe": RECIPE, "filter": lambda path, eqn: True}
    rows = jaxmp.explain_autocast(loss, PARAMS, X, **options).rows
    assert "allow, not fp8: the function computes both operands" in {row.group for row in rows}


def layers(params, x):
    for w, b in params:
        x = jnp.tanh(x @ w + lax.expand_dims(b, range(x.ndim - b.ndim)))
    return x


def labels(logits):
    return -jnp.take_along_axis(logits, jnp.zeros((len(logits), 1), int), 1).mean()


def attention(params, x):
    q, k, v = (x @ w + b[None] for w, b in params[:3])
    return labels(layers(params[3:], jax.nn.softmax(q @ k.T) @ v))


def columns(params, x):
    x = x.T
    for w, b in params:
        x = jnp.tanh(w @ x + b[:, None])
    return x[:, [0, 0]]


# each with six layers, in which no product makes a part of a weight
DATA = {
    "the label's logit": lambda p, x: labels(layers(p, x)),
    "rows, then layers": lambda p, x: layers(p[3:], layers(p[:3], x)[jnp.array([0, 0, 0])]),
    "two towers, one of a row": lambda p, x: labels(layers(p[:3], x[:1])) + layers(p[3:], x).mean(),
    "two towers, multiplied": lambda p, x: layers(p[:3], x[:1]) @ layers(p[3:], jnp.cos(x)).T,
    "a bias with an axis of one": lambda p, x: labels(layers([(w, lax.reshape(b, (1, SIDE))) for w, b in p], x)),
    "a batch of sequences": lambda p, x: labels(layers(p, x[:, None])[:, 0]),
    "columns": columns,
    "an example at a time": lambda p, x: labels(jnp.stack([layers(p, row) for row in x])),
    "vmap": lambda p, x: labels(jax.vmap(lambda row: layers(p, row))(x)),
    "remat": lambda p, x: labels(jax.checkpoint(layers)(p, x)),
    "a masked weight": lambda p, x: labels(layers([(w * (w > 0), b) for w, b in p], x)),
    "a product of two": lambda p, x: labels(layers(p[2:], layers(p[:1], x) @ (A1 @ B1))),
    "attention": attention,
}
OTHERS = {"two towers, multiplied": 1, "a product of two": 1, "attention": 2}  # in 16 bits


@pytest.mark.thorough(5)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", DATA)
def test_a_layer_of_one_row_is_no_weight(name, rows):
    """x w + b of one row has the form of W + A B; nothing that is done with it takes its matmul out of fp8."""
    params = [(W * (i + 1), G * i) for i in range(6)]
    fn = jaxmp.autocast(DATA[name], "fp8", recipe=RECIPE, filter=lambda path, eqn: True)
    found = matmuls(fn, params, X[:rows])
    times = rows if name == "an example at a time" else 1
    assert found.pop(FORWARD) == 6 * times
    assert sum(found.values()) == OTHERS.get(name, 0)


def hypernetwork(p):
    """A row that becomes a matrix."""
    z = p["m"][:1, :16]
    return layers([(p["b"], p["g"]), (p["wide"], p["wide g"])], z).reshape(SIDE, SIDE)


@pytest.mark.thorough(3)
@pytest.mark.parametrize("rows", [1, 2, 48])
@pytest.mark.parametrize("how", ["plain", "unbatched", "scan", "remat"])
def test_weights_made_of_weights_beside_a_row(how, rows):
    """Of one row, too: the products that make a weight stay in 16 bits, the matmuls by it run in fp8."""
    made = {
        "LoRA": lambda p: p["w"] + p["a"] @ p["b"],
        "LoRA of heads": lambda p: (p["heads"] + jnp.einsum("dr,rhk->dhk", p["a"], p["rhk"])).reshape(SIDE, SIDE),
        "LoRA of one head": lambda p: (p["head"] + jnp.einsum("dr,rhk->dhk", p["a"], p["r1k"]))[:, 0],
        "product": lambda p: p["a2"] @ p["b2"],
        "hypernetwork": hypernetwork,
        "normed": lambda p: p["w"] / jnp.linalg.norm(p["w"], axis=0, keepdims=True),
    }
    params = PARAMS | {"wide": jnp.ones((SIDE, SIDE * SIDE)) / 99, "wide g": jnp.ones(SIDE * SIDE)}
    params |= {"heads": W.reshape(SIDE, 2, 16), "head": W[:, None], "rhk": B1.reshape(16, 2, 16), "r1k": B1[:, None]}

    def loss(params, x):
        h = layers([(params["first"], params["g"])], x)
        return layers([(make(params), params["g"]) for make in made.values()], h)

    hows = {
        "plain": loss,
        "unbatched": lambda p, x: jax.vmap(lambda row: loss(p, row))(x),
        "scan": lambda p, x: lax.scan(lambda c, row: (c, loss(p, row[None])), 0, x)[1],
        "remat": jax.checkpoint(loss),
    }
    fn = jaxmp.autocast(hows[how], "fp8", recipe=RECIPE, filter=lambda path, eqn: True)
    assert matmuls(fn, params, X[:rows]) == {FORWARD: 7, "bfloat16": 6}


@pytest.mark.parametrize("rows", [1, 2])
def test_tables_that_are_made_of_weights(rows):
    """A table with an adapter, looked up and tied, of which the product stays in 16 bits; and a codebook."""

    def loss(params, tokens):
        table = params["w"] + params["a"] @ params["b"]
        h = layers([(params["m"], params["g"])], table[tokens])
        codes = params["first"] / jnp.linalg.norm(params["first"], axis=1, keepdims=True)
        h = layers([(params["last"], params["g"])], codes[jnp.argmax(h @ codes.T, 1)])
        return labels(h @ table.T)

    fn = jaxmp.autocast(loss, "fp8", recipe=RECIPE, filter=lambda path, eqn: True)
    found = matmuls(fn, PARAMS, jnp.arange(rows))
    assert found == {FORWARD: 4, "bfloat16": 1}


def test_rows_say_why_other_products_are_left():
    def loss(params, x):
        h = jnp.tanh(x @ params["first"]) @ (params["w"] + params["a"] @ params["b"])
        h = lax.ragged_dot(h, params["stack"], jnp.array([20, 28]))
        image, kernel = h[:16].reshape(1, 4, 4, SIDE), params["w"][None, None]
        image = lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.mean(image) + jnp.mean(h @ params["last"])

    rows = jaxmp.explain_autocast(loss, PARAMS, X, dtype="fp8", recipe=RECIPE).rows
    groups = {row.group for row in rows}
    for why in (
        "it makes a part of a weight",
        "call jaxmp.fp8.ragged_dot",
        "it is a convolution",
        "the last operation",
    ):
        assert any(why in group for group in groups), (why, groups)


def test_lora_in_a_scan_trains_all_its_parts():
    """A stack of layers with adapters: in fp8, and the gradients of A and B are those of float32."""
    stack = {name: jnp.stack([PARAMS[name]] * 3) for name in ("w", "a", "b")}

    def loss(stack, x):
        body = lambda h, p: (jnp.tanh(h @ (p["w"] + p["a"] @ p["b"])), None)  # noqa: E731
        return jnp.mean(lax.scan(jax.checkpoint(body), x, stack)[0] ** 2)

    assert matmuls(in_fp8(loss), stack, X)[FORWARD] == 1
    got, expected = (jax.jit(jax.grad(f))(stack, X) for f in (in_fp8(loss), loss))
    for name, value in expected.items():
        assert np.linalg.norm(got[name] - value) <= 0.2 * np.linalg.norm(value)
