"""`first_bad_op`: overflows planted in a layer, a loop, a branch, a derivative are found there, and masks are not."""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from jaxmp.monitor import first_bad_op

HALF = np.float16


class Block(nn.Module):
    """x times a weight that is 1, but in the one that is meant to overflow."""

    weight: float = 1.0

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2, use_bias=False, dtype=HALF, kernel_init=nn.initializers.constant(self.weight))(x)


class Model(nn.Module):
    weight: float
    remat: bool = False

    @nn.compact
    def __call__(self, x):
        kind = nn.remat(Block) if self.remat else Block
        for name, weight in (("one", 1.0), ("two", self.weight), ("three", 1.0)):
            x = kind(weight, name=name)(x)
        return x.astype(jnp.float32)


def linen_case(remat, weight):
    model, x = Model(weight, remat), jnp.ones((3, 2))
    params = jax.jit(model.init)(jax.random.key(0), x)
    return lambda params, x, scale: jnp.mean(model.apply(params, x)) * scale, params, x


@pytest.mark.thorough(1)
@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_a_layer_of_linen_that_overflows_forward(remat):
    loss_fn, params, x = linen_case(remat, 4e4)
    bad = first_bad_op(jax.value_and_grad(loss_fn), params, x, 1.0)
    assert (bad.primitive, bad.module, bad.backward) == ("dot_general", "two/Dense_0", False)
    assert bad.where() == "dot_general in two/Dense_0 (forward)"
    assert __file__ in bad.source and bad.source.endswith("(Block.__call__)")
    assert bad.code in pathlib.Path(__file__).read_text() and "Dense" in bad.code
    assert bad.code in str(bad)
    assert (bad.dtype, bad.shape, bad.limit) == ("float16", (3, 2), 65504.0)
    assert [(x.dtype, x.shape, x.amax, x.finite) for x in bad.operands] == [
        ("float16", (3, 2), 2.0, True),
        ("float16", (2, 2), 40000.0, True),
    ]
    assert (bad.first.index, bad.first.count, bad.first.value) == ((0, 0), 6, np.inf)
    assert bad.float32_amax == 2 * 2 * 40000.0
    assert "in float32 its largest is 160000; float16 ends at 65504 (2.44 times beyond)" in str(bad)


@pytest.mark.parametrize("remat", [False, True], ids=["plain", "remat"])
def test_a_layer_of_linen_that_overflows_backward(remat):
    """Layer three reads 2 * 2 * 2048; its weight's gradient is the sum of three of these times scale / 6."""
    loss_fn, params, x = linen_case(remat, 2048.0)
    bad = first_bad_op(jax.value_and_grad(loss_fn), params, x, 2.0**8)
    assert (bad.primitive, bad.module, bad.backward) == ("dot_general", "three/Dense_0", True)
    np.testing.assert_allclose(bad.float32_amax, 3 * 8192 * 2.0**8 / 6, rtol=1e-3)
    assert first_bad_op(jax.value_and_grad(loss_fn), params, x, 1.0) is None


# One operation in a function


def powers(x, factors):
    """The running product."""

    def body(carry, factor):
        with jax.named_scope("step"):
            carry = carry * factor
        return carry, carry

    return lax.scan(body, x, factors)[1]


def nested(x, factors):
    return lax.scan(lambda carry, row: (powers(carry, row)[-1], 0), x, factors, reverse=True)[0]


def loop(x, end=9):
    return lax.while_loop(lambda state: state[0] < end, lambda state: (state[0] + 1, state[1] * 10), (0, x))[1]


def switch(index, x):
    return lax.switch(index, [jnp.exp, lambda x: 1 / (x - 20), lambda x: x * 4000], x)


@jax.custom_vjp
def square(x):
    return x


square.defvjp(lambda x: (x, x), lambda x, g: (g * x / 0,))


@jax.custom_jvp
def log(x):
    return jnp.log(x)


log.defjvps(lambda t, y, x: t / x)
MASK = jnp.array([True, True, False, False])


def softmax_of(scores, mask=MASK):
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))


def through_bits(x):
    """fp8 quantizes through integers, which are always finite."""
    with jax.named_scope("log"):
        y = jnp.log(x)
    return lax.bitcast_convert_type(lax.bitcast_convert_type(y, jnp.int32) ^ 0, jnp.float32) * 2


def flags(x):
    y = jnp.log(x)
    bits = lax.bitcast_convert_type(y, jnp.int32)
    return jnp.where(jnp.isnan(y), 0, y), jnp.isnan(y), jnp.sum(jnp.isnan(y)), bits


def half(*values):
    return np.array(values if len(values) > 1 else values[0], HALF)


FACTORS, TWENTY = half(1, 100, 100, 7, 1, 2), half(20, 20)
SMALL_LAST = half(1000, 1, 50, 100, 2**-10, 2**-10)
BATCH = {"x": jnp.ones((2, 2)).at[1, 0].set(jnp.nan), "mask": jnp.array(-jnp.inf)}
OVER_DEVICES = jax.shard_map(
    lambda x: lax.psum(x, "a"),
    mesh=jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,)),
    in_specs=P("a"),
    out_specs=P(),
)
# name: the function, its arguments, `where()` of the operation, and what else is known of it
CASES = {
    "scan": (powers, (half(1), FACTORS), "mul in step (forward, iteration 3)", {"amaxes": [10000.0, 7.0]}),
    "scan in checkpoint": (jax.checkpoint(powers), (half(1), FACTORS), "mul in step (forward, iteration 3)", {}),
    "scan in reverse, of a scan": (
        nested,
        (half(1), np.array([[300, 300], [300, 1]], HALF)),
        "mul in step (forward, iteration 0, iteration 0)",
        {"iterations": (0, 0)},
    ),
    "backward pass of a scan": (
        jax.grad(lambda x: powers(x, SMALL_LAST)[-1].astype(jnp.float32) * 2.0**30),
        (half(2.0**-12),),
        None,
        {"backward": True},
    ),
    "while": (loop, (half(1, 1),), "mul in (top) (forward, iteration 4)", {}),
    # rows go on while their own test holds: 10 and 10000, then 100000
    "while under vmap": (jax.vmap(loop), (jnp.ones((2, 3), HALF), jnp.array([1, 5])), None, {"iterations": (4,)}),
    "first branch": (switch, (0, TWENTY), None, {"primitive": "exp"}),
    "third branch": (switch, (2, TWENTY), None, {"primitive": "mul"}),
    "custom_vjp": (jax.grad(lambda x: jnp.sum(square(x))), (jnp.ones(2),), None, {"primitive": "div"}),
    "custom_jvp": (lambda x: log(x), (jnp.zeros(2),), None, {"primitive": "log"}),
    "jit that donates": (
        lambda x: jax.jit(lambda x: x * 300, donate_argnums=0)(x + 0),
        (half(300, 300),),
        "mul in (top) (forward)",
        {"primitive": "mul"},
    ),
    "shard_map is one operation": (
        lambda x: OVER_DEVICES(x) * 1,
        (jnp.full(8, 3e4, HALF),),
        None,
        {"primitive": "shard_map", "float32_amax": None},
    ),
    # its input holds -inf already; what is new are elements that were finite
    "beside a mask": (
        lambda x: softmax_of(jnp.where(MASK, x, -jnp.inf) * HALF(8)),
        (jnp.full(4, 1e4, HALF),),
        "mul in (top) (forward)",
        {"index": (0,), "count": 2},
    ),
    "a row without anything allowed": (
        lambda x: softmax_of(x, ~MASK & MASK),
        (jnp.ones(4),),
        None,
        {"primitive": "sub", "note": "makes NaN from inf"},
    ),
    # 1 / sqrt(x) is computed with the forward pass and multiplied by zero in the backward pass
    "gradient of where": (
        jax.grad(lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))),
        (jnp.array([0.0, 1.0]),),
        "div in (top) (forward)",
        {"index": (0,)},
    ),
    "infinite constant": (
        lambda x: x * jnp.inf,
        (jnp.ones(2),),
        None,
        {"note": "an operand is infinite from the start: a constant of the program"},
    ),
    "argument": (
        lambda scale, batch: jnp.sum(batch["x"] * scale),
        (1.0, BATCH),
        "argument 1/x[1, 0] is nan; 1 of 4 values are not finite",
        {"primitive": "argument", "module": "1/x"},
    ),
    "bad in float32 too": (lambda x: jnp.log(x), (jnp.zeros(2, HALF),), None, {"float32_amax": np.inf}),
    "float32": (lambda x: x + x, (jnp.finfo(jnp.float32).max,), None, {"dtype": "float32", "float32_amax": None}),
    "e5m2": (
        lambda x: x + x,
        (jnp.asarray(57344.0, jnp.float8_e5m2),),
        None,
        {"dtype": "float8_e5m2", "float32_amax": 2 * 57344.0},
    ),
    "bits": (through_bits, (jnp.array([-1.0, 1.0]),), None, {"module": "log"}),
    "constant array": (
        lambda x: (x, np.array([0.0, np.inf])),
        (jnp.ones(2),),
        "constant 1[1] is inf; 1 of 2 values are not finite",
        {},
    ),
}


@pytest.mark.thorough(10)
@pytest.mark.parametrize("name", CASES)
def test_the_operation_is_named(name):
    fn, args, where, known = CASES[name]
    bad = first_bad_op(fn, *args)
    assert bad is not None and (where is None or bad.where() == where)
    seen = vars(bad) | vars(bad.first) | {"amaxes": [x.amax for x in bad.operands]}
    assert {key: seen[key] for key in known} == known, bad
    if name == "bad in float32 too":
        assert "in float32 it gives inf too: the range of float16 is not the cause" in str(bad)


FINE = {
    "mask": (softmax_of, (jnp.ones(4),)),
    "log of 0 under a softmax": (lambda x: jax.nn.softmax(jnp.log(x)), (jnp.arange(4.0),)),
    "mask as an argument": (lambda x, bias: jax.nn.softmax(x + bias), (jnp.ones(2), jnp.array([0, -jnp.inf]))),
    "rows that end": (jax.vmap(loop), (jnp.ones((2, 3), HALF), jnp.array([1, 4]))),
    "bits": (through_bits, (jnp.array([2.0, 1.0]),)),
    "flags and counts": (jax.jit(flags), (jnp.array([-1.0, 1.0]),)),
    "strings and None": (lambda x, how, times, other: x * times, (np.ones(2), "twice", 2, None)),
}


@pytest.mark.parametrize("name", FINE)
def test_what_reaches_no_result_is_no_fault(name):
    fn, args = FINE[name]
    assert first_bad_op(fn, *args) is None


def test_a_mask_among_the_arguments_is_no_fault_beside_an_overflow():
    mask = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), 0, -jnp.inf)

    def loss_fn(q, x, mask):
        with jax.named_scope("scores"):
            scores = (x @ q) @ (x @ q).T
        return jnp.mean(jax.nn.softmax(scores.astype(jnp.float32) + mask) @ x.astype(jnp.float32))

    q, x = np.eye(4, dtype=HALF), np.ones((4, 4), HALF)
    assert first_bad_op(jax.grad(loss_fn), q, x, mask) is None
    assert first_bad_op(jax.grad(loss_fn), HALF(300) * q, x, mask).where() == "dot_general in scores (forward)"
    x[1, 2] = np.inf
    bad = first_bad_op(jax.grad(loss_fn), q, x, mask)
    assert bad.where().startswith("argument 1[1, 2] is inf")


class Fp8Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(2):
            x = nn.Dense(16, use_bias=False, name=f"dense_{i}")(nn.relu(x))
        return x


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("recipe", "value"),
    [(jaxmp.fp8.CurrentScaling(), np.nan), (jaxmp.fp8.DelayedScaling(), np.nan), (jaxmp.fp8.DelayedScaling(), 3e38)],
    ids=["current-nan", "delayed-nan", "delayed-large"],
)
def test_in_fp8_training_the_param_or_the_layer_is_named(recipe, value):
    """The casts to fp8 keep NaN as bits, and the layer that reads them is not the cause."""
    model, x = Fp8Net(), np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32) * np.float32(100)
    with jaxmp.fp8.autocast(recipe, filter=lambda path, layer: path.endswith("dense_1")):
        params = jax.jit(model.init)(jax.random.key(1), x)["params"]

        def loss_fn(params, x):
            return jnp.mean(model.apply({"params": params}, x) ** 2)

        tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=recipe)
        step, opt_state = jaxmp.value_and_grad(loss_fn, policy="bf16"), jax.jit(tx.init)(params)
        kernel = np.array(params["dense_0"]["kernel"])
        kernel[1] = value
        params["dense_0"]["kernel"] = kernel
        bad = first_bad_op(lambda params, x: step(params, x, opt_state=opt_state), params, x)
    if np.isnan(value):
        assert (bad.primitive, bad.module, bad.first.index) == ("argument", "0/dense_0/kernel", (1, 0))
    else:
        assert (bad.module, bad.backward) == ("dense_0", False)
