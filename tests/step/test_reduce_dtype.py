"""`reduce_dtype="float32"`: gradients of weights are made in float32, so devices sum them in float32.

XLA under plain jit inserts its all-reduce where a sum over rows ends: at the product or sum whose result has no axis of
rows. So these must have float32 results. Looked for in the traced program, since XLA for CPU reduces bfloat16 in
float32 in any case.
"""

import functools
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
import regimes
from helpers import assert_exact
from jaxmp._src.programs import jaxprs

WIDTH, ROWS, LAYERS = 16, 88, 3
GROUPS = np.array([8, 40, 40], np.int32)

_rng = np.random.default_rng(0)


def _matrix(*shape):
    return (_rng.normal(size=shape) / math.sqrt(shape[-2] if len(shape) > 1 else 4)).astype(np.float32)


PARAMS = {
    "w": _matrix(WIDTH, WIDTH),
    "v": _matrix(WIDTH, WIDTH),
    "b": _matrix(WIDTH),
    "s": np.float32(1.5),
    "down": _matrix(WIDTH, 4),
    "up": _matrix(4, WIDTH),
    "kernel": _matrix(3, 1, WIDTH),
    "layers": _matrix(LAYERS, WIDTH, WIDTH),
}
X = 4 * _matrix(ROWS, WIDTH)


def wide(bias, x):
    return bias.reshape((1,) * (x.ndim - 1) + bias.shape)


def dense(p, x):
    return jnp.tanh(x @ p["w"] + wide(p["b"], x)) @ p["v"].T * p["s"]


def stacked(p, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])[0]


def recurrent(p, x):
    return jax.lax.scan(lambda h, _: (jnp.tanh(h @ p["w"] + wide(p["b"], h)), None), x, None, length=3)[0]


def remat_in_a_loop(p, x):
    return jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["layers"])[0]


def jitted(p, x):
    @jax.jit
    def layer(p, x):
        return dense(p, dense(p, dense(p, x)))

    return layer(p, x)


def lora(p, x):
    return x @ (p["w"] + 0.5 * p["down"] @ p["up"])


def norm(p, x):
    return (x @ p["w"]) * wide(1 + p["b"], x) / p["s"]


def for_each_row(p, x):
    return jax.vmap(lambda row: dense(p, row))(x)


def chosen(p, x):
    return jax.lax.cond(x[0, 0] > 0, lambda: x @ p["w"] + wide(p["b"], x), lambda: x @ p["v"])


def with_its_own_dtype(p, x):
    return nn.Dense(WIDTH, dtype=jnp.bfloat16).apply({"params": {"kernel": p["w"], "bias": p["b"]}}, x)


def convolution(p, x):
    numbers = ("NWC", "WIO", "NWC")
    return jax.lax.conv_general_dilated(x[:, :, None], p["kernel"], (1,), "SAME", dimension_numbers=numbers).sum(1)


def experts(p, x):
    return jax.lax.ragged_dot(x, p["layers"], GROUPS)


def embedding(p, x):
    return jnp.take(p["w"], jnp.abs(8 * x[:, 0]).astype(int) % WIDTH, axis=0) @ p["w"].T


def by_hand_in_16_bits(p, x):
    with jaxmp.autocast(enabled=False):
        return x.astype(jnp.bfloat16) @ p["w"].astype(jnp.bfloat16)


@jax.custom_vjp
def _with_own_rule(x, w, b):
    return x @ w.T + wide(b, x)


def _forward(x, w, b):
    return _with_own_rule(x, w, b), (x, w)


def _backward(kept, g):
    x, w = kept
    weight = jnp.einsum("ri,rj->ij", g, x)
    return g @ w, 0.5 * (weight + wide(jnp.zeros(WIDTH), weight)), jnp.sum(g, axis=0)  # a sum like that of a bias


_with_own_rule.defvjp(_forward, _backward)


def own_rule_in_a_jit(p, x):
    return jax.jit(lambda p, x: _with_own_rule(jnp.tanh(_with_own_rule(x, p["w"], p["b"])), p["v"], p["b"]))(p, x)


@jax.custom_jvp
def _with_own_jvp(x, w):
    return x @ w


@_with_own_jvp.defjvp
def _along(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return _with_own_jvp(x, w), dx @ w + x @ dw


def own_jvp(p, x):
    return _with_own_jvp(jnp.tanh(_with_own_jvp(x, p["w"])), p["v"])


def split_by_hand(p, x):
    """The sum over devices is the transpose of a param that all devices share, or of what is made of params."""
    p = p | {"v": jnp.tanh(p["v"])}
    specs = {"in_specs": (P(), P(regimes.AXIS)), "out_specs": P(regimes.AXIS)}
    return jax.shard_map(dense, mesh=regimes.mesh_of(), **specs, check_vma=False)(p, x)


MODELS = (
    own_rule_in_a_jit, own_jvp, split_by_hand, dense, stacked, recurrent, remat_in_a_loop, jitted,
    lora, norm, for_each_row, chosen, with_its_own_dtype, convolution, experts, embedding, by_hand_in_16_bits,
)  # fmt: skip
CASES = [(model, "bf16") for model in MODELS] + [
    (dense, "fp16"), (dense, "bf16-mixed"), (own_rule_in_a_jit, "bf16-mixed"), (split_by_hand, "bf16-mixed"),
]  # fmt: skip


@functools.cache
def state(policy):
    """On the host: an array that is made under a mesh keeps it, for tests without one too."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=2.0**10)
    return jax.device_get(jax.jit(tx.init)(PARAMS))


def loss_of(model):
    return lambda p, x: jnp.mean(model(p, x).astype(jnp.float32) ** 2)


def gradient(model, policy, **options):
    """A function of params and rows."""
    compute = jaxmp.value_and_grad(loss_of(model), policy=policy, **options)
    return functools.partial(compute, opt_state=state(policy))


def low_sums(jaxpr, rows):
    """The products and sums over an axis of `rows` elements whose results have 16 bits."""
    low = []
    for eqn in jaxprs.equations(jaxpr):
        name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
        if name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS | {"reduce_sum", "scatter-add", "psum", "psum_invariant"}:
            over = any(rows in getattr(v.aval, "shape", ()) for v in eqn.invars) and rows not in out.shape
            over |= name.startswith("psum")  # over devices
            low += [name] if over and out.dtype in (jnp.bfloat16, jnp.float16) else []
    return low


def policy_of(name, reduce_dtype="float32"):
    return jaxmp.get_policy(name, keep_fp32=(), reduce_dtype=reduce_dtype)


def params_of(policy, params=PARAMS):
    return jax.tree.map(jnp.asarray, policy.cast_to_param(params))


def assert_near(actual, expected, atol):
    """Leaves agree within `atol`, relative to the largest element of each; the actual ones are float32."""
    for g, h in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert g.dtype == jnp.float32
        h = np.asarray(h, np.float32)
        np.testing.assert_allclose(g, h, rtol=0, atol=atol * (np.abs(h).max() + 2**-30))


@functools.cache
def dense_gradients(name):
    """On one device."""
    policy = policy_of(name)
    return jax.device_get(jax.jit(gradient(dense, policy))(params_of(policy), X)[1])


@pytest.mark.thorough(6)
@pytest.mark.parametrize(("model", "name"), CASES, ids=lambda x: getattr(x, "__name__", x))
def test_no_sum_over_rows_ends_in_16_bits(model, name):
    policy, plain = policy_of(name), policy_of(name, None)
    p = params_of(policy)
    jaxpr, (_, grads) = jax.make_jaxpr(gradient(model, policy), return_shape=True)(p, X)
    assert low_sums(jaxpr, ROWS) == []
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    jaxpr, (_, grads) = jax.make_jaxpr(gradient(model, plain), return_shape=True)(p, X)
    if model is not split_by_hand or name != "bf16-mixed":  # float32 params enter it in float32
        assert low_sums(jaxpr, ROWS)
    assert {g.dtype for g in jax.tree.leaves(grads)} == {policy.param_dtype}


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("model", "name"),
    [(dense, "fp16"), (stacked, "bf16"), (embedding, "bf16-mixed")],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_the_loss_stays_and_the_gradients_are_closer(model, name):
    policy, plain = policy_of(name), policy_of(name, None)
    p = params_of(policy)
    both = jax.jit(lambda p, x: (gradient(model, policy)(p, x), gradient(model, plain)(p, x)))
    (loss, grads), (plain_loss, plain_grads) = both(p, X)
    assert abs(loss - plain_loss) <= 2**-20 * abs(plain_loss)
    assert_near(grads, plain_grads, 2**-6)
    assert all(is_not_rounded(g, policy) for g in jax.tree.leaves(grads) if g.ndim > 1 and np.any(g))


def is_not_rounded(g, policy):
    """Whether no rounding to 16 bits came last."""
    g = np.asarray(g)
    return np.any(g != g.astype(policy.compute_dtype).astype(np.float32))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed"])
def test_what_holds_functions_rounds_no_gradient(name):
    """Loops over stacked params, remat, branches, shard_map, derivatives of one's own, and each in the other."""
    policy = policy_of(name)
    layers = {key: PARAMS["layers"] * np.float32(1 + i / 8) for i, key in enumerate(("scanned", "kept", "in_both"))}
    mats = {key: _matrix(WIDTH, WIDTH) for key in ("remat", "branch", "device", "jvp")}

    def model(p, x):
        x = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["scanned"])[0]
        x = jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["kept"])[0]
        x = jax.checkpoint(lambda w, x: jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0])(p["in_both"], x)
        x = jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(p["remat"], x)
        x = jax.lax.cond(x[0, 0] > 2, jnp.tanh, lambda x: jnp.tanh(x @ p["branch"]), x)
        axis = P(regimes.AXIS)
        spread = jax.shard_map(jnp.matmul, mesh=regimes.mesh_of(), in_specs=(axis, P()), out_specs=axis)
        return _with_own_jvp(jnp.tanh(spread(x, p["device"])), p["jvp"])

    params = layers | mats
    loss, grads = jax.jit(gradient(model, policy))(params_of(policy, params), X)
    exact_loss, exact = jax.jit(jax.value_and_grad(loss_of(model)))(params, X)
    assert abs(loss - exact_loss) < 2**-4 * exact_loss
    for path, g in grads.items():
        assert is_not_rounded(g, policy), path
        expected = exact[path] * 2.0**10
        np.testing.assert_allclose(g, expected, rtol=0, atol=2**-3 * np.abs(expected).max(), err_msg=path)


@pytest.mark.parametrize("name", ["bf16", "bf16-mixed"])
def test_no_rounding_comes_after_the_product(name):
    """The gradient of a weight is the float32 product of the 16-bit data and the 16-bit cotangent."""
    policy = policy_of(name)
    loss_fn = lambda w, x: jnp.sum((x @ w).astype(jnp.float32))  # noqa: E731
    compute = jax.jit(jaxmp.value_and_grad(loss_fn, policy=policy))
    grads = compute(params_of(policy)["w"], X, opt_state=state(policy))[1]
    ones = np.full((ROWS, WIDTH), 2.0**10, np.float64)
    expected = X.astype(jnp.bfloat16).astype(np.float64).T @ ones
    np.testing.assert_allclose(grads, expected, rtol=0, atol=2**-20 * np.abs(expected).max())


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("name", "check_vma"), [("bf16", True), ("bf16-mixed", False)])
def test_in_shard_map_and_microbatches(name, check_vma):
    policy = policy_of(name)
    whole, in_two = gradient(dense, policy), gradient(dense, policy, accumulate=2)
    mean = lambda p, x: jax.lax.pmean((whole(p, x)[1], in_two(p, x)[1]), regimes.AXIS)  # noqa: E731
    specs = {"in_specs": (P(), P(regimes.AXIS)), "out_specs": P()}
    traced = jax.jit(jax.shard_map(mean, mesh=regimes.mesh_of(), **specs, check_vma=check_vma)).trace(
        params_of(policy), X
    )
    assert low_sums(traced.jaxpr, ROWS // regimes.DEVICES) == []
    for grads in traced.lower().compile()(params_of(policy), X):
        assert_near(grads, dense_gradients(name), 2**-7)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type):
    policy, mesh = policy_of("bf16"), regimes.mesh_of(axis_type)
    with jax.set_mesh(mesh):
        p = jax.device_put(policy.cast_to_param(PARAMS), NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P(regimes.AXIS)))
        traced = jax.jit(gradient(dense, policy)).trace(p, x)
        assert low_sums(traced.jaxpr, ROWS) == []
        grads = traced.lower().compile()(p, x)[1]
    assert_near(grads, dense_gradients("bf16"), 2**-7)


def test_pmap():
    policy = policy_of("bf16")
    p, compute = params_of(policy), gradient(dense, policy)
    run = lambda x: jax.lax.pmean(compute(p, x)[1], "data")  # noqa: E731
    devices = jax.devices()[: regimes.DEVICES]
    grads = jax.pmap(run, axis_name="data", devices=devices)(X.reshape(regimes.DEVICES, -1, WIDTH))
    assert_near(jax.tree.map(lambda g: g[0], grads), dense_gradients("bf16"), 2**-8)


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WIDTH, WIDTH, rngs=rngs)
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.dense = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.conv = nnx.Conv(WIDTH, WIDTH, (3,), rngs=rngs)

    def __call__(self, tokens):
        return self.embed.attend(nnx.relu(self.dense(self.norm(self.conv(self.embed(tokens))))))


TOKENS = np.random.default_rng(1).integers(0, WIDTH, (24, 10))


def token_loss(logits, tokens):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), tokens))


def nnx_gradients(policy):
    model = Nnx(nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), policy=policy)
    compute = jaxmp.nnx.value_and_grad(lambda model, tokens: token_loss(model(tokens), tokens))
    return lambda tokens: nnx.as_pure(compute(model, tokens, opt_state=optimizer)[1])


@pytest.mark.parametrize("name", ["bf16", "bf16-mixed"])
def test_no_sum_over_rows_of_a_model_of_nnx_ends_in_16_bits(name):
    """With embeddings, convolutions and norms."""
    jaxpr, grads = jax.make_jaxpr(nnx_gradients(policy_of(name)), return_shape=True)(TOKENS)
    assert low_sums(jaxpr, len(TOKENS)) == []
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    jaxpr = jax.make_jaxpr(nnx_gradients(policy_of(name, None)))(TOKENS)
    assert low_sums(jaxpr, len(TOKENS))


@pytest.mark.thorough(0)
def test_an_ensemble():
    """Layers of inputs with three axes: XLA for CPU has no product of bfloat16 for their gradients."""
    policy = policy_of("bf16")
    members = jax.tree.map(lambda p: np.stack([p, -p]), jax.device_get(params_of(policy)))
    traced = jax.jit(jax.vmap(gradient(dense, policy), (0, None))).trace(members, X.reshape(11, 8, WIDTH))
    assert low_sums(traced.jaxpr, 11) == []
    grads = traced.lower().compile()(members, X.reshape(11, 8, WIDTH))[1]
    assert_near(jax.tree.map(lambda g: g[0], grads), dense_gradients("bf16"), 2**-7)


def test_a_step_can_be_differentiated():
    """Forward over reverse, and reverse over reverse."""
    policy = policy_of("bf16-mixed")
    compute, x, t = gradient(dense, policy), X, np.ones_like(X)
    total = lambda x: sum(jnp.sum(g) for g in jax.tree.leaves(compute(PARAMS, x)[1]))  # noqa: E731
    both = jax.jit(lambda x: (jax.jvp(total, (x,), (t,))[1], jnp.vdot(jax.grad(total)(x), t)))
    forward, reverse = both(x)
    np.testing.assert_allclose(forward, reverse, rtol=2**-4)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("model", "name", "outer"),
    [(dense, "bf16", jnp.float16), (jitted, "bf16-mixed", jnp.float16), (jitted, "bf16", jnp.bfloat16)],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_inside_an_autocast_function(model, name, outer):
    policy = policy_of(name)
    p, compute = params_of(policy), gradient(model, policy)
    traced = jax.jit(jaxmp.autocast(lambda p, x: compute(p, x), outer)).trace(p, X)
    assert low_sums(traced.jaxpr, ROWS) == []
    assert jnp.float16 not in {d for eqn in jaxprs.equations(traced.jaxpr) for d in jaxprs.dtypes_of(eqn.outvars)}
    (loss, grads), (alone, expected) = traced.lower().compile()(p, X), jax.jit(compute)(p, X)
    assert abs(loss - alone) <= 2**-8 * abs(alone)
    assert_near(grads, expected, 2**-7)


def test_masters_move_by_the_unrounded_gradient():
    policy, params32 = policy_of("bf16"), {"w": PARAMS["w"]}
    tx = jaxmp.mixed_precision(optax.sgd(1.0), policy)

    @jax.jit
    def step(p, opt_state):
        _, grads = jaxmp.value_and_grad(lambda p: jnp.mean((X @ p["w"]) ** 2), policy=policy)(p, opt_state=opt_state)
        return grads, *jaxmp.apply_gradients(tx, grads, opt_state, p)

    grads, p, opt_state = step(policy.cast_to_param(params32), tx.init(params32))
    assert is_not_rounded(grads["w"], policy)
    assert_exact(jaxmp.get_master_params(opt_state, p)["w"], PARAMS["w"] - np.asarray(grads["w"]))


def test_what_a_policy_says():
    assert jaxmp.get_policy("bf16-mixed").reduce_dtype == jaxmp.get_policy("16-mixed").reduce_dtype == jnp.float32
    assert {jaxmp.get_policy(name).reduce_dtype for name in ("fp32", "tf32", "fp16", "bf16", "fp8")} == {None}
    policy = jaxmp.get_policy("bf16", reduce_dtype=jnp.float32)
    assert policy == jaxmp.get_policy("bf16", reduce_dtype="float32") != jaxmp.get_policy("bf16")
    assert jaxmp.get_policy(policy).reduce_dtype == jnp.float32
    assert jaxmp.get_policy(policy, reduce_dtype=None) == jaxmp.get_policy("bf16")
    assert str(policy) == "params=bfloat16,compute=bfloat16,output=float32 reduce_dtype='float32'"
    off = jaxmp.get_policy("bf16-mixed", reduce_dtype=None)
    assert str(off) == "params=float32,compute=bfloat16,output=float32 reduce_dtype=None"
    assert jaxmp.get_policy("fp32", reduce_dtype="float32").reduce_dtype == jnp.float32


@pytest.mark.parametrize(
    "name, dtype, message",
    [
        ("bf16", "bfloat16", "reduce_dtype must be float32 or None; got 'bfloat16'"),
        ("fp8", "float32", "with a recipe must have no reduce_dtype; got 'float32' with DelayedScaling"),
        (
            "params=float16,compute=float32,output=float32",
            "float32",
            "must go with computation in 16 bits; got .* with compute_dtype=float32",
        ),
    ],
)
def test_what_a_policy_refuses(name, dtype, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.get_policy(name, reduce_dtype=dtype)
