"""`first_bad_op`: overflows planted in a layer, a loop, a branch, a derivative are found there, and masks are not."""

import pathlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from jaxmp.monitor import first_bad_op

HALF = jnp.float16


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


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(2, 2, use_bias=False, dtype=HALF, rngs=rngs) for _ in range(3)])
        self.head = nnx.Linear(2, 1, rngs=rngs)
        self.by_name = {}

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_layer_of_nnx(way):
    model = NnxModel(nnx.Rngs(0))
    for i, block in enumerate(model.blocks):
        block.kernel[...] = jnp.full((2, 2), 4e4 if i == 1 and way == "forward" else 1.0)
    model.head.kernel[...] = jnp.full((2, 1), 1.0 if way == "forward" else 4e4)
    bad = first_bad_op(nnx.grad(lambda model, x: jnp.sum(model(x))), model, jnp.ones((3, 2)))
    module = {"forward": "blocks/1", "backward": "blocks/2"}[way]
    assert (bad.primitive, bad.module, bad.backward) == ("dot_general", module, way == "backward")
    assert type(model) is NnxModel and type(model.head) is nnx.Linear


# Control flow


def powers(x, factors):
    """The running product."""

    def body(carry, factor):
        with jax.named_scope("step"):
            carry = carry * factor
        return carry, carry

    return lax.scan(body, x, factors)[1]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["plain", "jit", "checkpoint"])
def test_a_scan_names_the_iteration(wrap):
    factors = jnp.array([1, 100, 100, 7, 1, 2], HALF)
    bad = first_bad_op(wrap(powers), jnp.ones((), HALF), factors)
    assert (bad.where(), bad.iterations) == ("mul in step (forward, iteration 3)", (3,))
    assert [x.amax for x in bad.operands] == [10000.0, 7.0]


def test_a_reversed_scan_and_one_in_another():
    factors = jnp.array([[300, 300], [300, 1]], HALF)

    def nested(x, factors):
        return lax.scan(lambda carry, row: (powers(carry, row)[-1], 0), x, factors, reverse=True)[0]

    bad = first_bad_op(nested, jnp.ones((), HALF), factors)
    assert (bad.iterations, bad.operands[1].amax) == ((0, 0), 300.0)


def test_the_backward_pass_of_a_scan():
    """d(sum of products)/dx overflows in the iteration that multiplies the cotangent beyond 65504."""
    factors = jnp.array([1000, 1, 50, 100, 2**-10, 2**-10], HALF)
    small = jnp.asarray(2.0**-12, HALF)
    loss_fn = lambda x: powers(x, factors)[-1].astype(jnp.float32) * 2.0**30  # noqa: E731
    assert first_bad_op(loss_fn, small) is None
    bad = first_bad_op(jax.grad(loss_fn), small)
    assert bad.backward and bad.float32_amax > 65504


def test_a_while_loop_names_the_iteration():
    def f(x):
        return lax.while_loop(lambda state: state[0] < 9, lambda state: (state[0] + 1, state[1] * 10), (0, x))[1]

    bad = first_bad_op(f, jnp.ones(2, HALF))
    assert (bad.primitive, bad.iterations) == ("mul", (4,))


def test_a_while_loop_under_vmap_goes_on_in_the_rows_whose_test_holds():
    def f(x, end):
        return lax.while_loop(lambda state: state[0] < end, lambda state: (state[0] + 1, state[1] * 10), (0, x))[1]

    x = jnp.ones((2, 3), HALF)
    assert first_bad_op(jax.vmap(f), x, jnp.array([1, 4])) is None  # four times in all rows: 10 and 10000
    bad = first_bad_op(jax.vmap(f), x, jnp.array([1, 5]))
    assert (bad.primitive, bad.iterations) == ("mul", (4,))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_branch_that_ran_is_looked_into(index):
    branches = [jnp.exp, lambda x: 1 / (x - 20), lambda x: x * 4000]
    bad = first_bad_op(lambda i, x: lax.switch(i, branches, x), index, jnp.full(2, 20.0, HALF))
    assert bad.primitive == ("exp", "div", "mul")[index]


def test_custom_derivatives_are_entered():
    @jax.custom_vjp
    def square(x):
        return x

    square.defvjp(lambda x: (x, x), lambda x, g: (g * x / 0,))
    assert first_bad_op(jax.grad(lambda x: jnp.sum(square(x))), jnp.ones(2)).primitive == "div"

    @jax.custom_jvp
    def log(x):
        return jnp.log(x)

    log.defjvps(lambda t, y, x: t / x)
    assert first_bad_op(lambda x: log(x), jnp.zeros(2)).primitive == "log"


def test_a_jit_inside_that_donates_leaves_its_input_readable():
    inner = jax.jit(lambda x: x * 300, donate_argnums=0)
    bad = first_bad_op(lambda x: inner(x + 0), jnp.full(2, 300.0, HALF))
    assert (bad.primitive, bad.operands[0].amax) == ("mul", 300.0)


def test_a_shard_map_is_one_operation():
    mesh = jax.make_mesh((8,), ("a",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(lambda x: lax.psum(x, "a"), mesh=mesh, in_specs=P("a"), out_specs=P())
    bad = first_bad_op(lambda x: f(x) * 1, jnp.full(8, 3e4, HALF))
    assert (bad.primitive, bad.operands[0].amax, bad.float32_amax) == ("shard_map", 3e4, None)


# What counts


MASK = jnp.array([True, True, False, False])


def softmax_of(scores, mask=MASK):
    return jax.nn.softmax(jnp.where(mask, scores, -jnp.inf))


def test_an_inf_that_reaches_no_result_is_no_fault():
    assert first_bad_op(softmax_of, jnp.ones(4)) is None
    assert first_bad_op(lambda x: jax.nn.softmax(jnp.log(x)), jnp.arange(4.0)) is None
    assert first_bad_op(lambda x, bias: jax.nn.softmax(x + bias), jnp.ones(2), jnp.array([0, -jnp.inf])) is None


def test_an_overflow_beside_a_mask_is_found():
    """The operation's input holds -inf already; what is new are elements that were finite."""
    bad = first_bad_op(lambda x: softmax_of(jnp.where(MASK, x, -jnp.inf) * HALF(8)), jnp.full(4, 1e4, HALF))
    assert (bad.primitive, bad.first.index, bad.first.count) == ("mul", (0,), 2)


def test_a_row_without_anything_allowed_is_nan_of_inf():
    bad = first_bad_op(lambda x: softmax_of(x, ~MASK & MASK), jnp.ones(4))
    assert (bad.primitive, bad.note) == ("sub", "makes NaN from inf")


def test_the_gradient_of_where_is_found_behind_the_mask():
    """1 / sqrt(x) is computed with the forward pass and multiplied by zero in the backward pass."""
    bad = first_bad_op(jax.grad(lambda x: jnp.sum(jnp.where(x > 0, jnp.sqrt(x), 0.0))), jnp.array([0.0, 1.0]))
    assert (bad.primitive, bad.backward, bad.first.index) == ("div", False, (0,))


def test_an_infinite_constant_is_named():
    bad = first_bad_op(lambda x: x * jnp.inf, jnp.ones(2))
    assert bad.note == "an operand is infinite from the start: a constant of the program"


def test_an_argument_that_is_not_finite_is_named():
    batch = {"x": jnp.ones((2, 2)).at[1, 0].set(jnp.nan), "mask": jnp.array(-jnp.inf)}
    bad = first_bad_op(lambda scale, batch: jnp.sum(batch["x"] * scale), 1.0, batch)
    assert (bad.primitive, bad.module, bad.first.index) == ("argument", "1/x", (1, 0))
    assert str(bad) == "argument 1/x[1, 0] is nan; 1 of 4 values are not finite"


def test_what_is_bad_in_float32_too_is_said():
    bad = first_bad_op(lambda x: jnp.log(x), jnp.zeros(2, HALF))
    assert bad.float32_amax == np.inf
    assert "in float32 it gives inf too: the range of float16 is not the cause" in str(bad)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float8_e5m2, jnp.float32])
def test_other_dtypes(dtype):
    big = jnp.asarray(jnp.finfo(dtype).max, dtype)
    bad = first_bad_op(lambda x: x + x, big)
    assert bad.dtype == jnp.dtype(dtype).name
    twice = {jnp.bfloat16: np.inf, jnp.float8_e5m2: 2 * 57344.0, jnp.float32: None}
    assert bad.float32_amax == twice[dtype]


def test_a_mask_among_the_arguments_is_no_fault_beside_an_overflow():
    mask = jnp.where(jnp.tril(jnp.ones((4, 4), bool)), 0, -jnp.inf)

    def loss_fn(q, x, mask):
        with jax.named_scope("scores"):
            scores = (x @ q) @ (x @ q).T
        return jnp.mean(jax.nn.softmax(scores.astype(jnp.float32) + mask) @ x.astype(jnp.float32))

    q, x = jnp.eye(4, dtype=HALF), jnp.ones((4, 4), HALF)
    assert first_bad_op(jax.grad(loss_fn), q, x, mask) is None
    assert first_bad_op(jax.grad(loss_fn), 300 * q, x, mask).where() == "dot_general in scores (forward)"
    assert (
        first_bad_op(jax.grad(loss_fn), q, x.at[1, 2].set(jnp.inf), mask).where().startswith("argument 1[1, 2] is inf")
    )


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, lambda f: lambda x: lax.map(f, x)], ids=["plain", "jit", "map"])
def test_what_goes_through_the_bits_of_a_float_is_followed(wrap):
    """fp8 quantizes through integers, which are always finite."""

    def fn(x):
        with jax.named_scope("log"):
            y = jnp.log(x)
        bits = lax.bitcast_convert_type(y, jnp.int32) ^ 0
        return lax.bitcast_convert_type(bits, jnp.float32) * 2

    assert first_bad_op(wrap(fn), jnp.array([-1.0, 1.0])).module == "log"
    assert first_bad_op(wrap(fn), jnp.array([2.0, 1.0])) is None


def test_flags_and_counts_of_what_is_not_finite_are_finite():
    def fn(x):
        y = jnp.log(x)
        bits = lax.bitcast_convert_type(y, jnp.int32)
        return jnp.where(jnp.isnan(y), 0, y), jnp.isnan(y), jnp.sum(jnp.isnan(y)), bits

    assert first_bad_op(jax.jit(fn), jnp.array([-1.0, 1.0])) is None


def test_a_constant_that_is_returned_is_named():
    constant = np.array([0.0, np.inf])
    assert str(first_bad_op(lambda x: (x, constant), jnp.ones(2))) == (
        "constant 1[1] is inf; 1 of 2 values are not finite"
    )
    assert first_bad_op(lambda x: (x, float("nan")), jnp.ones(2)).primitive == "constant"
    assert first_bad_op(lambda x: (x, 3, np.arange(2)), jnp.ones(2)) is None


class Fp8Net(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.relu(nn.Dense(16, name=f"dense_{i}")(x))
            with jax.named_scope(f"after_{i}"):
                x = jnp.where(jnp.arange(16) == 20, 0, x)
        return nn.Dense(1, name="head")(x)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("recipe", [jaxmp.fp8.DelayedScaling(), jaxmp.fp8.CurrentScaling()], ids=["delayed", "current"])
@pytest.mark.parametrize("value", [jnp.nan, 3e38])
def test_in_fp8_training_the_param_or_the_layer_is_named(recipe, value):
    """The casts to fp8 keep NaN as bits, and the layer that reads them is not the cause."""
    model, x = Fp8Net(), jax.random.normal(jax.random.key(0), (16, 16)) * 100
    with jaxmp.fp8.autocast(recipe):
        params = jax.jit(model.init)(jax.random.key(1), x)["params"]

        def loss_fn(params, x):
            return jnp.mean(model.apply({"params": params}, x) ** 2)

        tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=recipe)
        step, opt_state = jaxmp.value_and_grad(loss_fn, policy="bf16"), tx.init(params)
        params["dense_0"]["kernel"] = params["dense_0"]["kernel"].at[1].set(value)
        bad = first_bad_op(lambda params, x: step(params, x, opt_state=opt_state), params, x)
    if np.isnan(value):
        assert (bad.primitive, bad.module, bad.first.index) == ("argument", "0/dense_0/kernel", (1, 0))
    else:
        assert (bad.module, bad.backward) == ("dense_0", False)


@pytest.mark.thorough(0)
def test_in_fp8_training_the_operation_is_named():
    with jaxmp.fp8.autocast(filter=lambda path, layer: True):
        model = nn.Dense(16, dtype=jnp.bfloat16, name="dense")
        params = jax.jit(model.init)(jax.random.key(0), jnp.ones((16, 16)))["params"]

        def loss_fn(params, x):
            return jnp.sum(jnp.exp(model.apply({"params": params}, x).astype(jnp.float32) * 1e4))

        step = jaxmp.value_and_grad(loss_fn)
        state = jax.jit(jaxmp.mixed_precision(jaxmp.fused_sgd(0.1), "fp8").init)(params)
        bad = first_bad_op(lambda params, x: step(params, x, opt_state=state), params, jnp.ones((16, 16)))
    assert (bad.primitive, bad.backward) == ("exp", False)


def test_python_numbers_strings_and_none_are_passed_on():
    def f(x, how, times, other=None):
        assert (how, times, other) == ("twice", 2, None)
        return x * times

    assert first_bad_op(f, np.ones(2), "twice", 2, other=None) is None
