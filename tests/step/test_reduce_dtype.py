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


def rematerialized(p, x):
    return jax.checkpoint(dense)(p, x)


def remat_in_a_loop(p, x):
    return jax.lax.scan(jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None)), x, p["layers"])[0]


def jitted(p, x):
    @jax.jit
    def layer(p, x):
        return dense(p, dense(p, dense(p, x)))

    return layer(p, x)


def lora(p, x):
    return x @ (p["w"] + 0.5 * p["down"] @ p["up"])


def masked(p, x):
    return x @ (p["w"] * jnp.tril(jnp.ones((WIDTH, WIDTH))))


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


def own_rule(p, x):
    return _with_own_rule(jnp.tanh(_with_own_rule(x, p["w"], p["b"])), p["v"], p["b"])


def own_rule_in_a_jit(p, x):
    return jax.jit(own_rule)(p, x)


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
    own_rule, own_rule_in_a_jit, own_jvp, split_by_hand, dense, stacked, recurrent, rematerialized, remat_in_a_loop,
    jitted, lora, masked, norm, for_each_row, chosen, with_its_own_dtype, convolution, experts, embedding,
    by_hand_in_16_bits,
)  # fmt: skip


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
    found = []
    for eqn in jaxprs.equations(jaxpr):
        name, out = eqn.primitive.name, eqn.outvars[0].aval if eqn.outvars else None
        if name in jaxprs.MATMULS | jaxprs.RAGGED_MATMULS | {"reduce_sum", "scatter-add", "psum", "psum_invariant"}:
            over = any(rows in getattr(v.aval, "shape", ()) for v in eqn.invars) and rows not in out.shape
            over |= name.startswith("psum")  # over devices
            found += [name] if over and out.dtype in (jnp.bfloat16, jnp.float16) else []
    return found


def policy_of(name, **options):
    return jaxmp.get_policy(name, keep_fp32=(), **options)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed", "fp16"])
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_sum_over_rows_ends_in_16_bits(model, name):
    policy, plain = policy_of(name, reduce_dtype="float32"), policy_of(name, reduce_dtype=None)
    p = jax.tree.map(jnp.asarray, policy.cast_to_param(PARAMS))
    traced = jax.make_jaxpr(gradient(model, policy), return_shape=True)(p, X)
    assert low_sums(traced[0], ROWS) == []
    assert {g.dtype for g in jax.tree.leaves(traced[1][1])} == {np.dtype(np.float32)}
    before = jax.make_jaxpr(gradient(model, plain), return_shape=True)(p, X)
    if model is not split_by_hand or name != "bf16-mixed":  # float32 params enter it in float32
        assert low_sums(before[0], ROWS)
    assert {g.dtype for g in jax.tree.leaves(before[1][1])} == {policy.param_dtype}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed", "fp16"])
@pytest.mark.parametrize("model", (dense, stacked, embedding), ids=lambda model: model.__name__)
def test_the_loss_stays_and_the_gradients_are_closer(model, name):
    policy, plain = policy_of(name, reduce_dtype="float32"), policy_of(name, reduce_dtype=None)
    p = jax.tree.map(jnp.asarray, policy.cast_to_param(PARAMS))
    loss, grads = jax.jit(gradient(model, policy))(p, X)
    plain_loss, plain_grads = jax.jit(gradient(model, plain))(p, X)
    assert abs(loss - plain_loss) <= 2**-20 * abs(plain_loss)
    for g, h in zip(jax.tree.leaves(grads), jax.tree.leaves(plain_grads), strict=True):
        scale = np.abs(np.asarray(h, np.float32)).max()
        np.testing.assert_allclose(g, np.asarray(h, np.float32), atol=2**-6 * scale)
    assert all(is_not_rounded(g, policy) for g in jax.tree.leaves(grads) if g.ndim > 1 and np.any(g))


def is_not_rounded(g, policy):
    """Whether no rounding to 16 bits came last."""
    return np.any(g != g.astype(policy.compute_dtype).astype(jnp.float32))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed", "fp16"])
def test_what_holds_functions_rounds_no_gradient(name):
    """Loops over stacked params, remat, branches, shard_map, derivatives of one's own, and each in the other."""
    policy = policy_of(name, reduce_dtype="float32")
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
    p = jax.tree.map(jnp.asarray, policy.cast_to_param(params))
    loss, grads = jax.jit(gradient(model, policy))(p, X)
    exact_loss, exact = jax.jit(jax.value_and_grad(loss_of(model)))(params, X)
    assert abs(loss - exact_loss) < 2**-4 * exact_loss
    for path, g in grads.items():
        assert is_not_rounded(g, policy), path
        expected = exact[path] * 2.0**10
        np.testing.assert_allclose(g, expected, rtol=0, atol=2**-3 * np.abs(expected).max(), err_msg=path)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed"])
def test_no_rounding_comes_after_the_product(name):
    """The gradient of a weight is the float32 product of the 16-bit data and the 16-bit cotangent."""
    policy = policy_of(name, reduce_dtype="float32")
    w = jnp.asarray(policy.cast_to_param(PARAMS["w"]))
    loss_fn = lambda w, x: jnp.sum((x @ w).astype(jnp.float32))  # noqa: E731
    compute = jaxmp.value_and_grad(loss_fn, policy=policy)
    found = compute(w, X, opt_state=state(policy))[1]
    ones = np.full((ROWS, WIDTH), 2.0**10, np.float64)
    expected = np.asarray(jnp.asarray(X, jnp.bfloat16), np.float64).T @ ones
    np.testing.assert_allclose(found, expected, rtol=0, atol=2**-20 * np.abs(expected).max())


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_and_microbatches(name, check_vma):
    policy = policy_of(name, reduce_dtype="float32")
    p = jax.tree.map(jnp.asarray, policy.cast_to_param(PARAMS))
    whole, in_two = gradient(dense, policy), gradient(dense, policy, accumulate=2)

    def mean(p, x):
        grads, summed = whole(p, x)[1], in_two(p, x)[1]
        assert {g.dtype for g in jax.tree.leaves((grads, summed))} == {np.dtype(np.float32)}
        return jax.lax.pmean((grads, summed), regimes.AXIS)

    mesh = regimes.mesh_of()
    run = jax.shard_map(mean, mesh=mesh, in_specs=(P(), P(regimes.AXIS)), out_specs=P(), check_vma=check_vma)
    assert low_sums(jax.make_jaxpr(run)(p, X), ROWS // regimes.DEVICES) == []
    found, summed = jax.jit(run)(p, X)
    expected = jax.jit(gradient(dense, policy))(p, X)[1]
    for other in (found, summed):
        for g, h in zip(jax.tree.leaves(other), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(g, h, atol=2**-7 * (np.abs(h).max() + 2**-30))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_on_a_mesh(axis_type):
    policy = policy_of("bf16", reduce_dtype="float32")
    mesh = regimes.mesh_of(axis_type)
    with jax.set_mesh(mesh):
        p = jax.device_put(policy.cast_to_param(PARAMS), NamedSharding(mesh, P()))
        x = jax.device_put(X, NamedSharding(mesh, P(regimes.AXIS)))
        run = jax.jit(gradient(dense, policy))
        assert low_sums(run.trace(p, x).jaxpr, ROWS) == []
        found = run(p, x)[1]
    expected = jax.jit(gradient(dense, policy))(policy.cast_to_param(PARAMS), X)[1]
    for g, h in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(g, h, atol=2**-7 * (np.abs(h).max() + 2**-30))


def test_pmap():
    policy = policy_of("fp16", reduce_dtype="float32")
    p = policy.cast_to_param(PARAMS)
    x = X.reshape(regimes.DEVICES, -1, WIDTH)
    compute = gradient(dense, policy)
    run = lambda x: jax.lax.pmean(compute(p, x)[1], "data")  # noqa: E731
    devices = jax.devices()[: regimes.DEVICES]
    found = jax.pmap(run, axis_name="data", devices=devices)(x)
    expected = jax.jit(gradient(dense, policy))(p, X)[1]
    for g, h in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g[0], h, atol=2**-8 * (np.abs(h).max() + 2**-30))


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        embed = nn.Embed(WIDTH, WIDTH)
        x = nn.Conv(WIDTH, (3,))(embed(tokens))
        block = nn.scan(nn.remat(Block), variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = block()(x, None)
        return embed.attend(x)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.relu(nn.Dense(WIDTH)(nn.LayerNorm()(x))), None


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


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed", "fp16"])
def test_linen(name):
    policy = policy_of(name, reduce_dtype="float32")
    model = Linen()
    params = jax.jit(model.init)(jax.random.key(0), TOKENS)["params"]
    made = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params, tx=optax.adamw(1e-2), policy=policy)

    def step(made, tokens):
        loss_fn = lambda p, t: token_loss(model.apply({"params": p}, t), t)  # noqa: E731
        loss, grads = jaxmp.value_and_grad(loss_fn)(made.params, tokens, opt_state=made)
        return made.apply_gradients(grads=grads), loss, grads

    traced = jax.jit(step).trace(made, TOKENS)
    assert low_sums(traced.jaxpr, len(TOKENS)) == []
    run = traced.lower().compile()
    losses = []
    for _ in range(8):
        made, loss, grads = run(made, TOKENS)
        losses.append(float(loss))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {np.dtype(np.float32)}
    assert {p.dtype for p in jax.tree.leaves(made.params)} == {policy.param_dtype}
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed", "fp16"])
def test_nnx(name):
    policy = policy_of(name, reduce_dtype="float32")
    model = Nnx(nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, optax.adamw(1e-2), policy=policy)

    @nnx.jit
    def step(model, optimizer, tokens):
        compute = jaxmp.nnx.value_and_grad(lambda model, tokens: token_loss(model(tokens), tokens))
        loss, grads = compute(model, tokens, opt_state=optimizer)
        dtypes.update(g.dtype for g in jax.tree.leaves(grads))
        optimizer.update(model, grads)
        return loss

    dtypes = set()
    graphdef, variables = nnx.split((model, optimizer))

    def pure(variables, tokens):
        return step(*nnx.merge(graphdef, variables), tokens)

    assert low_sums(jax.make_jaxpr(pure)(variables, TOKENS), len(TOKENS)) == []
    assert dtypes == {np.dtype(np.float32)}
    losses = [float(step(model, optimizer, TOKENS)) for _ in range(8)]
    assert losses[-1] < losses[0] - 0.1


@pytest.mark.thorough(0)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed"])
def test_an_ensemble(name):
    """Layers of inputs with three axes: XLA for CPU has no product of bfloat16 for their gradients."""
    policy = policy_of(name, reduce_dtype="float32")
    x = X.reshape(11, 8, WIDTH)
    members = jax.tree.map(lambda p: jnp.stack([jnp.asarray(p), -jnp.asarray(p)]), policy.cast_to_param(PARAMS))
    run = jax.vmap(gradient(dense, policy), (0, None))
    assert low_sums(jax.make_jaxpr(run)(members, x), len(x)) == []
    found = jax.jit(run)(members, x)[1]
    alone = jax.jit(gradient(dense, policy))(jax.tree.map(lambda p: p[1], members), x)[1]
    for g, h in zip(jax.tree.leaves(found), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(g[1], h, atol=2**-7 * (np.abs(h).max() + 2**-30))


def test_a_step_can_be_differentiated():
    """Forward over reverse, and reverse over reverse."""
    policy = policy_of("bf16-mixed")
    p = jax.tree.map(jnp.asarray, PARAMS)
    compute = gradient(dense, policy)
    total = lambda x: sum(jnp.sum(g) for g in jax.tree.leaves(compute(p, x)[1]))  # noqa: E731
    x, t = jnp.asarray(X), jnp.ones_like(X)
    forward = jax.jit(lambda x: jax.jvp(total, (x,), (t,))[1])(x)
    reverse = jax.jit(lambda x: jnp.vdot(jax.grad(total)(x), t))(x)
    np.testing.assert_allclose(forward, reverse, rtol=2**-4)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", ["bf16", "bf16-mixed"])
@pytest.mark.parametrize("model", [dense, jitted], ids=lambda model: model.__name__)
@pytest.mark.parametrize("outer", [jnp.bfloat16, jnp.float16])
def test_inside_an_autocast_function(model, name, outer):
    policy = policy_of(name, reduce_dtype="float32")
    p = jax.tree.map(jnp.asarray, policy.cast_to_param(PARAMS))
    compute = gradient(model, policy)
    inside = jaxmp.autocast(lambda p, x: compute(p, x), outer)
    traced = jax.make_jaxpr(inside)(p, X)
    assert low_sums(traced, ROWS) == []
    assert jnp.float16 not in {d for eqn in jaxprs.equations(traced) for d in jaxprs.dtypes_of(eqn.outvars)}
    (loss, grads), (alone, expected) = jax.jit(inside)(p, X), jax.jit(compute)(p, X)
    assert abs(loss - alone) <= 2**-8 * abs(alone)
    for g, h in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert g.dtype == jnp.float32
        np.testing.assert_allclose(g, h, atol=2**-7 * (np.abs(h).max() + 2**-30))


def test_masters_move_by_the_unrounded_gradient():
    policy = policy_of("bf16", reduce_dtype="float32")
    tx = jaxmp.mixed_precision(optax.sgd(1.0), policy)
    opt_state, p = tx.init(PARAMS), policy.cast_to_param(PARAMS)
    _, grads = jax.jit(jaxmp.value_and_grad(loss_of(dense), policy=policy))(p, X, opt_state=opt_state)
    _, opt_state = jax.jit(functools.partial(jaxmp.apply_gradients, tx))(grads, opt_state, p)
    master = jaxmp.get_master_params(opt_state, p)["w"]
    assert_exact(master, jnp.asarray(PARAMS["w"]) - grads["w"])


def test_what_a_policy_says():
    assert jaxmp.get_policy("bf16-mixed").reduce_dtype == jaxmp.get_policy("16-mixed").reduce_dtype == jnp.float32
    assert {jaxmp.get_policy(name).reduce_dtype for name in ("fp32", "tf32", "fp16", "bf16", "fp8")} == {None}
    said = jaxmp.get_policy("bf16", reduce_dtype=jnp.float32)
    assert said == jaxmp.get_policy("bf16", reduce_dtype="float32") != jaxmp.get_policy("bf16")
    assert jaxmp.get_policy(said).reduce_dtype == jnp.float32
    assert jaxmp.get_policy(said, reduce_dtype=None) == jaxmp.get_policy("bf16")
    assert str(said) == "params=bfloat16,compute=bfloat16,output=float32 reduce_dtype='float32'"
    off = jaxmp.get_policy("bf16-mixed", reduce_dtype=None)
    assert str(off) == "params=float32,compute=bfloat16,output=float32 reduce_dtype=None"
    assert jaxmp.get_policy("fp32", reduce_dtype="float32").reduce_dtype == jnp.float32


@pytest.mark.parametrize(
    "name, given, message",
    [
        ("bf16", "bfloat16", "reduce_dtype must be float32 or None; got 'bfloat16'"),
        ("bf16", jnp.float64, "reduce_dtype must be float32"),
        ("fp8", "float32", "with a recipe must have no reduce_dtype; got 'float32' with DelayedScaling"),
        (
            "params=float16,compute=float32,output=float32",
            "float32",
            "must go with computation in 16 bits; got .* with compute_dtype=float32",
        ),
    ],
)
def test_what_a_policy_refuses(name, given, message):
    with pytest.raises(ValueError, match=message):
        jaxmp.get_policy(name, reduce_dtype=given)
