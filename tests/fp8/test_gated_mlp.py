"""The gated MLP as one fp8 operation: against NumPy in float64, and in the ways in which three layers run."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close
from jaxmp._src.fp8.gated_mlp import GatedScales
from jaxmp.fp8 import CurrentScaling, DelayedScaling, Scales
from jaxmp.linen import GatedMLP

ROWS, WIDTH, HIDDEN, FEATURES = 128, 64, 192, 64
RECIPE = DelayedScaling(amax_history_len=2)
NAMES = ("gate", "up", "down")
RNG = np.random.default_rng(0)
X = RNG.normal(size=(2, ROWS // 2, WIDTH)).astype(np.float32)
G = RNG.normal(size=(2, ROWS // 2, FEATURES)).astype(np.float32) / 64
SHAPES = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, FEATURES)}
WEIGHTS = {name: RNG.normal(size=shape).astype(np.float32) / 8 for name, shape in SHAPES.items()}
SCALES = {"gate": (6, 9, 18), "up": (6, 8, 19), "down": (5, 9, 16)}  # log2, of lhs, rhs and grad


def leaves(scales=SCALES):
    return GatedScales(*(Scales(*(jnp.float32(x) for x in scales[name])) for name in NAMES))


@jax.jit
def run(x, weights, scales):
    return jaxmp.fp8.gated_mlp(x, *(weights[name] for name in NAMES), recipe=RECIPE, scales=scales)


@functools.cache
def gradients():
    """(y, gradients of sum(y * G) with respect to x, the weights and the scale leaves)."""

    @jax.jit
    def of(x, weights, scales):
        y, backward = jax.vjp(run, x, weights, scales)
        return y, backward(G)

    return of(X, WEIGHTS, leaves())


def cast(x, log2, dtype=ml_dtypes.float8_e4m3fn):
    """x in float64 after a cast by the scale 2^log2."""
    limit = float(ml_dtypes.finfo(dtype).max)
    return np.clip(x.astype(np.float32) * 2.0**log2, -limit, limit).astype(dtype).astype(np.float64) / 2.0**log2


def test_it_is_the_formula_with_each_tensor_cast_once():
    x_q, gate, up, down = cast(X, 6), cast(WEIGHTS["gate"], 9), cast(WEIGHTS["up"], 8), cast(WEIGHTS["down"], 9)
    grad_q = cast(G, 16, ml_dtypes.float8_e5m2)
    a, b = x_q @ gate, x_q @ up
    s = 1 / (1 + np.exp(-a))
    h = a * s * b
    h_q = cast(h, 5)
    d_h = grad_q @ down.T
    d_a, d_b = d_h * b * (s + a * s * (1 - s)), d_h * a * s
    a_q, b_q = cast(d_a, 18, ml_dtypes.float8_e5m2), cast(d_b, 19, ml_dtypes.float8_e5m2)
    flat = lambda t: t.reshape(-1, t.shape[-1])  # noqa: E731
    y, (d_x, d_weights, d_scales) = gradients()
    for got, expected in (
        (y, h_q @ down),
        (d_x, a_q @ gate.T + b_q @ up.T),
        (d_weights["gate"], flat(x_q).T @ flat(a_q)),
        (d_weights["up"], flat(x_q).T @ flat(b_q)),
        (d_weights["down"], flat(h_q).T @ flat(grad_q)),
    ):  # the last bits of float32 may round to the next number of fp8
        assert got.dtype == np.float32
        assert np.linalg.norm(got - expected) < 2e-3 * np.linalg.norm(expected)
    amaxes = {
        "gate": (X, WEIGHTS["gate"], d_a),
        "up": (X, WEIGHTS["up"], d_b),
        "down": (h, WEIGHTS["down"], G),
    }
    for name in NAMES:
        for got, tensor in zip(getattr(d_scales, name), amaxes[name], strict=True):
            assert_close(np.asarray(got), np.float32(np.max(np.abs(tensor))), rtol=1e-5)


@pytest.mark.thorough(0)
def test_under_vmap_there_is_one_amax():
    per_example = lambda x, weights, scales: jax.vmap(run, (0, None, None))(x, weights, scales)  # noqa: E731
    y, backward = jax.vjp(per_example, X, WEIGHTS, leaves())
    d_x, _, d_scales = backward(G)
    expected_y, (expected_d_x, _, expected_scales) = gradients()
    assert_close((y, d_x), (expected_y, expected_d_x), rtol=1e-5, atol=1e-5)
    lhs = [part.lhs for part in d_scales]
    assert_close(lhs, [part.lhs for part in expected_scales], rtol=1e-5)


class Layers(nn.Module):
    """The same as three Dense layers."""

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(nn.Dense, use_bias=False)
        h = nn.silu(dense(HIDDEN, name="gate")(x)) * dense(HIDDEN, name="up")(x)
        return dense(FEATURES, name="down")(h)


def anything(path, layer):
    return True


@functools.cache
def variables():
    return jax.jit(GatedMLP(HIDDEN, recipe=RECIPE).init)(jax.random.key(0), X)


@pytest.mark.thorough(0)
def test_the_module_has_the_params_of_three_layers_and_their_values():
    with jaxmp.fp8.autocast(RECIPE, filter=anything):
        expected = jax.jit(Layers().init)(jax.random.key(0), X)
    assert jax.tree.map(jnp.shape, variables()) == jax.tree.map(jnp.shape, expected)
    params = {"params": {name: variables()["params"][name] | {"kernel": WEIGHTS[name]} for name in NAMES}}
    with jaxmp.fp8.autocast(RECIPE, filter=anything):
        layers = jax.jit(Layers().apply)(params, X)
    got = jax.jit(GatedMLP(HIDDEN, recipe=RECIPE).apply)(params, X)
    assert np.linalg.norm(got - layers) < 2e-3 * np.linalg.norm(layers)
    with jaxmp.fp8.autocast(enabled=False):
        plain = [jax.jit(model.apply)(params, X) for model in (GatedMLP(HIDDEN, recipe=RECIPE), Layers())]
    assert_close(*plain, rtol=1e-6, atol=1e-6)
    stateless = GatedMLP(HIDDEN, recipe=CurrentScaling())
    assert np.linalg.norm(jax.jit(stateless.apply)(params, X) - plain[0]) < 0.1 * np.linalg.norm(plain[0])


@pytest.mark.thorough(0)
@pytest.mark.parametrize("fp8_weights", [False, True])
def test_the_module_trains_under_autocast_remat_and_calibration(fp8_weights):
    policy = jaxmp.get_policy("fp8", fp8_weights=fp8_weights)
    model = nn.remat(GatedMLP, policy=jaxmp.fp8.save_quantized)(HIDDEN, recipe=RECIPE)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, recipe=RECIPE)
    start = jax.jit(lambda params: (policy.cast_to_param(params), tx.init(params)))
    params, opt_state = start(variables()["params"])

    def loss(params, x):
        return jnp.mean((model.apply({"params": params}, x).astype(jnp.float32) - 1) ** 2)

    params, opt_state = jaxmp.fp8.calibrate(loss, params, X, tx=tx, opt_state=opt_state, policy=policy)
    metrics = jaxmp.get_metrics(opt_state)
    assert float(metrics["fp8/unused"]) == float(metrics["fp8/lost_gradients"]) == 0

    @jax.jit
    def step(params, opt_state):
        value, grads = jaxmp.value_and_grad(loss, policy=policy)(params, X, opt_state=opt_state)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), value, grads

    losses = []
    for _ in range(3):
        params, opt_state, value, grads = step(params, opt_state)
        losses.append(float(value))
    assert losses[2] < losses[0]
    amaxes = {path: float(x) for path, x in jaxmp.fp8.get_amaxes(grads).items()}
    assert len(amaxes) == 9 and all(amaxes.values())
    assert amaxes["gate/Fp8DotGeneral_0/fp8_lhs_e4m3_log2_scale"] == np.max(np.abs(X.astype(jnp.bfloat16)))
    assert jaxmp.get_metrics(opt_state)["fp8/saturated"] == 0


@pytest.mark.thorough(0)
def test_odd_widths_run_as_layers_and_odd_rows_are_padded():
    weights = {"gate": WEIGHTS["gate"][:, :40], "up": WEIGHTS["up"][:, :40], "down": WEIGHTS["down"][:40]}
    y = run(X, weights, leaves())
    expected = jax.nn.silu(X @ weights["gate"]) * (X @ weights["up"]) @ weights["down"]
    assert np.linalg.norm(y - expected) < 0.1 * np.linalg.norm(expected)
    some, those = run(X[:, :3], WEIGHTS, leaves()), run(X, WEIGHTS, leaves())[:, :3]
    assert np.linalg.norm(some - those) < 1e-2 * np.linalg.norm(those)  # h may be cast to the next number
    one = run(X[0, 0], weights, leaves())
    assert_close(one, y[0, 0], rtol=1e-5, atol=1e-5)


@pytest.mark.thorough(0)
def test_nvfp4_takes_a_key_like_dropouts():
    mlp, x = jaxmp.linen.GatedMLP(32, recipe=jaxmp.fp8.NVFP4()), jnp.ones((16, 16))
    params = jax.eval_shape(mlp.init, jax.random.key(0), x)["params"]

    def loss(params, rngs):
        return mlp.apply({"params": params}, x, rngs=rngs).sum()

    jax.eval_shape(jax.grad(loss), params, {"rounding": jax.random.key(1)})
    with pytest.raises(ValueError, match="needs a key"):
        jax.eval_shape(jax.grad(loss), params, {})
