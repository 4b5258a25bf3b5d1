"""With `accumulate=`: which arguments are cut, which keys are shared, and what passes through the microbatches."""

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
import regimes
from helpers import assert_close, assert_exact, assert_moved, assert_within_ulps

N, K = 8, 4
rng = np.random.default_rng(0)
X, Y = rng.normal(size=(N, 3)).astype(np.float32), rng.integers(0, N, N).astype(np.int32)
TARGETS = rng.normal(size=N).astype(np.float32)
PARAMS = {"w": rng.normal(size=(3, N)).astype(np.float32)}
STATE = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(PARAMS)


def cross_entropy(params, x, y, weights=None):
    losses = optax.softmax_cross_entropy_with_integer_labels(x @ params["w"], y)
    return jnp.mean(losses if weights is None else losses * weights[y])


def accumulated(loss_fn, *args, k=K, **options):
    has_aux = options.pop("has_aux", False)
    return jaxmp.value_and_grad(loss_fn, has_aux=has_aux, accumulate=k, **options)(PARAMS, *args, opt_state=STATE)


# --- which arguments hold the batch -----------------------------------------------------------------------------------


def test_class_weights_as_long_as_the_batch_are_asked_for():
    """Cut, they would be the weights of other classes."""
    weights = jnp.linspace(0.1, 2.0, N)
    message = r"got argument 3, of shape \(8,\), which the loss takes cut and whole. Name the batch: accumulate_argnums"
    with pytest.raises(ValueError, match=message):
        accumulated(cross_entropy, X, Y, weights)
    loss, _ = accumulated(cross_entropy, X, Y, weights, accumulate_argnums=(1, 2))
    assert_close(loss, cross_entropy(PARAMS, X, Y, weights), rtol=1e-6)


def squared(params, x, y):
    return jnp.mean((jnp.sum(x @ params["w"], -1) - y) ** 2)


CLEAR = {
    "labels": (cross_entropy, (X, Y)),
    "targets": (squared, (X, TARGETS)),
    "one argument": (lambda p, b: squared(p, b["x"], b["y"]), ({"x": X, "y": TARGETS},)),
    "not read": (lambda p, x, y, names: squared(p, x, y), (X, TARGETS, np.zeros((N, 2), np.float32))),
    "one row": (squared, (X[:K], TARGETS[:K])),
    "scalars": (lambda p, x, y, a: a * squared(p, x, y), (X, TARGETS, 1.0)),
    "keys": (lambda p, x, y, key: squared(p, x + jax.random.normal(key, x.shape), y), (X, TARGETS, jax.random.key(0))),
    "raw keys": (
        lambda p, x, y, key: squared(p, x + jax.jit(jax.random.normal, static_argnums=1)(key, x.shape), y),
        (X, TARGETS, np.array([0, 7], np.uint32)),
    ),
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", CLEAR)
def test_what_is_clear_needs_no_names(name):
    loss_fn, args = CLEAR[name]
    loss, _ = accumulated(loss_fn, *args)
    if "keys" not in name:
        assert_close(loss, loss_fn(PARAMS, *args), rtol=1e-6)


def test_two_integers_that_are_no_key():
    """An image size: splitting it as a key gave random sizes."""

    def loss_fn(params, x, size):
        return jnp.mean((x @ params["w"]) ** 2) * size[0].astype(jnp.float32) / size[1].astype(jnp.float32)

    size = np.array([32, 64], np.uint32)
    with pytest.raises(ValueError, match=r"got uint32\[2\] at argument 2, which the loss does not use as a key"):
        accumulated(loss_fn, X, size)
    loss, _ = accumulated(loss_fn, X, size, accumulate_argnums=1)
    assert_close(loss, loss_fn(PARAMS, X, size), rtol=1e-6)


def test_in_nnx():
    model = nnx.Linear(3, N, rngs=nnx.Rngs(0))

    def loss_fn(model, x, y, weights):
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(x), y) * weights[y])

    weights = jnp.ones(N)
    with pytest.raises(ValueError, match="got argument 3"):
        jaxmp.nnx.value_and_grad(loss_fn, accumulate=K)(model, X, Y, weights, opt_state=STATE)
    named = jaxmp.nnx.value_and_grad(loss_fn, accumulate=K, accumulate_argnums=(1, 2))
    loss, _ = named(model, X, Y, weights, opt_state=STATE)
    assert_close(loss, loss_fn(model, X, Y, weights), rtol=1e-6)


def squared_rows(params, x, y):
    return jnp.mean((x @ params["w"] - y) ** 2)


ROWS = rng.normal(size=(N, N)).astype(np.float32)
UNCUT = {
    "closed over": lambda k: accumulated(lambda p, x: squared_rows(p, x, ROWS), X, k=k),
    "traced": lambda k: jax.jit(lambda y: accumulated(lambda p, x: squared_rows(p, x, y), X, k=k))(ROWS),
    "differentiated": lambda k: jaxmp.value_and_grad(squared_rows, argnums=(0, 2), accumulate=k)(
        PARAMS, X, ROWS, opt_state=STATE
    ),
    "carried": lambda k: accumulated(lambda p, x, y: (squared_rows(p, x, y), y), X, ROWS, k=k, has_aux=True,
                                     carry_argnum=2),
}  # fmt: skip


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", UNCUT)
def test_rows_from_elsewhere_are_refused(name):
    """One row would be broadcast: another loss without an error. More rows do not fit: an error of shapes."""
    message = (
        r"got a loss that runs with 8 rows and not with 2: it closes over, diff.* \(argnums\) .* without accumulate="
    )
    for k in (N, K):
        with pytest.raises(ValueError, match=message) as e:
            UNCUT[name](k)
    assert "incompatible shapes" in str(e.value.__cause__)


def test_microbatches_of_one_row_are_the_batch():
    for n in (2, 3, N):
        loss, _ = accumulated(squared_rows, X[:n], ROWS[:n], k=n)
        assert_close(loss, squared_rows(PARAMS, X[:n], ROWS[:n]), rtol=1e-6)


# --- keys that all microbatches share ---------------------------------------------------------------------------------

KEY = jax.random.key(3)
SHARED = "every microbatch draws the same random numbers"


def dropped(params, x, key):
    return jnp.mean((nn.Dropout(0.5, deterministic=False).apply({}, x, rngs={"dropout": key}) @ params["w"]) ** 2)


def test_a_key_that_the_loss_closes_over_is_warned_of():
    for run in (
        lambda: accumulated(lambda p, x: dropped(p, x, KEY), X),
        lambda: accumulated(dropped, X, KEY, accumulate_argnums=1),
        lambda: jaxmp.value_and_grad(dropped, accumulate=K)(PARAMS, X, key=KEY, opt_state=STATE),
        lambda: jax.jit(lambda key: accumulated(lambda p, x: dropped(p, x, key), X))(KEY),
        lambda: accumulated(lambda p, x, step: dropped(p, x, jax.random.fold_in(KEY, step)), X, np.int32(3)),
        lambda: accumulated(lambda p, x, seed: dropped(p, x, jax.random.key(seed)), X, 3),
    ):
        with pytest.warns(UserWarning, match=SHARED):
            run()


@pytest.mark.thorough(0)
def test_keys_of_their_own_are_not():
    """Split with the batch; folded with it; of nnx, whose counts move; for noise of weights, which all may share."""

    def noisy_weights(params, x):
        w = params["w"] + 0.1 * jax.random.normal(KEY, params["w"].shape)
        return jnp.mean((x @ w) ** 2)

    class Net(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.linear(self.dropout(x))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        accumulated(dropped, X, KEY)
        accumulated(lambda p, x, step: dropped(p, x, jax.random.fold_in(KEY, step[0])), X, np.arange(N),
                    accumulate_argnums=(1, 2))  # fmt: skip
        accumulated(lambda p, x, key, step: dropped(p, x, jax.random.fold_in(key, step)), X, KEY, np.int32(3))
        accumulated(noisy_weights, X)
        nnx_loss = jaxmp.nnx.value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), accumulate=K)
        nnx_loss(Net(), X, opt_state=STATE)


# --- state through the microbatches -----------------------------------------------------------------------------------


class Normed(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(nn.Dense(4)(x))
        return jnp.sum(x**3, -1)


VARIABLES = {
    "params": {
        "BatchNorm_0": {"bias": np.zeros(4, np.float32), "scale": np.ones(4, np.float32)},
        "Dense_0": {"bias": np.zeros(4, np.float32), "kernel": rng.normal(size=(3, 4)).astype(np.float32)},
    },
    "batch_stats": {"BatchNorm_0": {"mean": np.zeros(4, np.float32), "var": np.ones(4, np.float32)}},
}
POLICY = jaxmp.get_policy("bf16", keep_fp32=("*BatchNorm*",))


class TrainState(jaxmp.linen.TrainState):
    batch_stats: Any


def normed_loss(params, batch_stats, x, y):
    out, new = Normed().apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
    return jnp.mean((out.astype(jnp.float32) - y) ** 2), new["batch_stats"]


def new_state():
    tx = jaxmp.mixed_precision(optax.sgd(0.01), POLICY)
    return TrainState.create(
        apply_fn=None, params=VARIABLES["params"], batch_stats=VARIABLES["batch_stats"], tx=tx, policy=POLICY
    )


def one_after_the_other(params, stats):
    """The statistics after K microbatches, by hand."""
    for x, y in zip(np.split(X, K), np.split(TARGETS, K), strict=True):
        stats = normed_loss(params, stats, x, y)[1]
    return stats


@pytest.mark.thorough(1)
@pytest.mark.parametrize("k", [1, K])
def test_batch_statistics_pass_through_the_microbatches(k):
    """One trace for all steps, no further axis, and a skipped step restores them."""
    traces = []

    @jax.jit
    def step(state, x, y):
        traces.append(0)
        compute = jaxmp.value_and_grad(
            normed_loss, has_aux=True, accumulate=k, accumulate_argnums=(2, 3), carry_argnum=1
        )
        (loss, stats), grads = compute(state.params, state.batch_stats, x, y, opt_state=state.opt_state)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    first = new_state()
    state, _ = step(first, X, TARGETS)
    if k == K:
        assert_close(state.batch_stats, one_after_the_other(first.params, first.batch_stats), rtol=2e-2, atol=1e-2)
    state, _ = step(state, X, TARGETS)
    assert len(traces) == 1
    skipped, _ = step(state, np.full_like(X, np.inf), TARGETS)
    assert_moved(skipped.batch_stats, state.batch_stats)


def test_aux_beside_the_statistics_is_stacked():
    def loss_fn(params, stats, x, y):
        loss, new = normed_loss(params, stats, x, y)
        return loss, (new, {"loss": loss})

    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    compute = jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=K, carry_argnum=1)
    (loss, (new, others)), _ = compute(params, stats, X, TARGETS, opt_state=STATE)
    assert others["loss"].shape == (K,)
    assert_close(jnp.mean(others["loss"]), loss, rtol=1e-6)
    assert_close(new, one_after_the_other(params, stats), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_statistics_inside_shard_map(check_vma):
    """Each device has its own after its own rows; their mean is the caller's to take."""
    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    P = jax.sharding.PartitionSpec
    n = regimes.DEVICES

    def step(x, y):
        compute = jaxmp.value_and_grad(normed_loss, has_aux=True, accumulate=2, carry_argnum=1)
        (_, new), _ = compute(params, stats, x, y, opt_state=STATE)
        return jax.tree.map(lambda s: jax.lax.pmean(s, regimes.AXIS), new)

    x, y = np.tile(X, (n // 2, 1)), np.tile(TARGETS, n // 2)
    spread = jax.shard_map(step, mesh=regimes.mesh_of(), in_specs=P(regimes.AXIS), out_specs=P(), check_vma=check_vma)
    new = jax.jit(spread)(x, y)
    assert jax.tree.map(jnp.shape, new) == jax.tree.map(jnp.shape, stats)
    assert not np.allclose(new["BatchNorm_0"]["mean"], 0)


class Fp8Normed(nnx.Module):
    def __init__(self, axis, rngs):
        self.dense = nnx.Linear(16, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, axis_name=axis, rngs=rngs)
        self.count = nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.count[...] += 1
        return nnx.relu(self.norm(self.dense(x)))


@pytest.mark.thorough(0)
def test_nnx_in_fp8_inside_shard_map_carries_statistics_as_one_device_does():
    P, n, k, recipe = jax.sharding.PartitionSpec, regimes.DEVICES, 2, jaxmp.fp8.DelayedScaling(amax_history_len=3)

    def job(axis):
        model = Fp8Normed(axis, nnx.Rngs(0))
        jaxmp.nnx.to_fp8(model, recipe, filter="dense")
        tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp8", recipe=recipe)
        graphdef, state = nnx.split((model, jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="fp8")))

        def step(state, x):
            model, optimizer = nnx.merge(graphdef, state)
            before = jaxmp.nnx.snapshot(model)
            loss_fn = lambda model, x: jnp.mean((model(x).astype(jnp.float32) - jnp.sin(x)) ** 2)  # noqa: E731
            _, grads = jaxmp.nnx.value_and_grad(loss_fn, accumulate=k)(model, x, opt_state=optimizer)
            grads = grads if axis is None else jax.lax.pmean(grads, axis)
            optimizer.update(model, grads)
            jaxmp.nnx.restore_if_skipped(optimizer.opt_state, model, before)
            return nnx.state((model, optimizer))

        return state, step

    (many, step), (one, step_of_one) = job(regimes.AXIS), job(None)
    specs = {"in_specs": (P(), P(regimes.AXIS)), "out_specs": P()}
    step, step_of_one = jax.jit(jax.shard_map(step, mesh=regimes.mesh_of(), **specs)), jax.jit(step_of_one)
    many = jax.device_put(many, jax.sharding.NamedSharding(regimes.mesh_of(), P()))
    rows = np.random.default_rng(0).normal(size=(4, n, k, 16, 16)).astype(np.float32)
    rows[1, 0, 0, 3, 3] = np.inf  # every device skips
    for x in rows:  # a microbatch of one device has the rows of that microbatch on all
        many = step(many, x.reshape(-1, 16))
        one = step_of_one(one, x.swapaxes(0, 1).reshape(-1, 16))
    assert int(many[0]["count"][...]) == k * 3
    assert_close(nnx.as_pure(many), nnx.as_pure(one), rtol=2.0**-5, atol=2.0**-7)  # scales and histories too


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["shard_map", "shard_map_unchecked", "pmap"])
def test_statistics_that_the_loss_averages_over_devices_stay_replicated(how):
    """As without microbatches, `out_specs=P()` takes them. Those of own rows vary, some one microbatch later."""
    P, axis, n, k = jax.sharding.PartitionSpec, regimes.AXIS, regimes.DEVICES, 3

    def loss_fn(w, carry, x):
        own, mean = jnp.mean(x), jax.lax.pmean(jnp.mean(x), axis)
        new = {
            "all": 0.5 * (carry["all"] + mean),
            "count": carry["count"] + 1,
            "late": carry["later"],
            "later": carry["own"],
            "own": own,
        }
        return jnp.mean(x * w), new

    def step(x):
        zero = jnp.zeros(())
        carry = {"all": zero, "count": jnp.zeros((), jnp.int32), "late": zero, "later": zero, "own": zero}
        compute = jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=k, carry_argnum=1)
        (_, new), _ = compute(jnp.ones(()), carry, x, opt_state=STATE)
        own = {name: new.pop(name)[None] for name in ("late", "later", "own")}
        return new, own

    x = np.arange(n * k, dtype=np.float32)
    if how == "pmap":
        run = jax.pmap(step, axis, devices=jax.devices()[:n])
        new, own = run(x.reshape(n, k))
        new, own = jax.tree.map(lambda a: a[0], new), jax.tree.map(lambda a: a[:, 0], own)
    else:
        run = jax.shard_map(
            step, mesh=regimes.mesh_of(), in_specs=P(axis), out_specs=(P(), P(axis)), check_vma=how == "shard_map"
        )
        new, own = jax.jit(run)(x)
    first, second, third = x.reshape(n, k).T
    assert_exact(new["all"], np.float32(((first.mean() / 2) + second.mean()) / 4 + third.mean() / 2))
    assert int(new["count"]) == k
    assert_moved(own, {"late": first, "later": second, "own": third})


def test_errors_of_carried_arguments():
    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    with pytest.raises(ValueError, match=r"carry_argnum names; got has_aux=False"):
        jaxmp.value_and_grad(normed_loss, carry_argnum=1)(params, stats, X, TARGETS, opt_state=STATE)
    wrong = lambda *args: (normed_loss(*args)[0], {"other": 1.0})  # noqa: E731
    with pytest.raises(ValueError, match="other is in aux only"):
        jaxmp.value_and_grad(wrong, has_aux=True, carry_argnum=1)(params, stats, X, TARGETS, opt_state=STATE)


def test_stacked_statistics_are_refused():
    """Without carry_argnum: each step would add an axis."""
    state = new_state()
    compute = jaxmp.value_and_grad(normed_loss, has_aux=True, accumulate=K, accumulate_argnums=(2, 3))
    run = jax.jit(lambda params, stats: compute(params, stats, X, TARGETS, opt_state=state.opt_state))
    (_, stats), grads = run(state.params, state.batch_stats)
    with pytest.raises(ValueError, match=r"got \(4, 4\) in new and \(4,\) in old at batch_stats/.*carry_argnum="):
        state.apply_gradients(grads=grads, batch_stats=stats)
    with pytest.raises(ValueError, match=r"got \(2,\) in new and \(1,\) in old at mean"):
        jaxmp.keep_if_skipped(state.opt_state, {"mean": np.zeros(2)}, {"mean": np.zeros(1)})


def test_class_weights_inside_the_batch_are_asked_for():
    """As long as the batch, and in one dict with it: they may be cut or not, and each is refused or named."""
    rng = np.random.default_rng(0)
    x, y, weights = rng.normal(size=(4, 3)).astype(np.float32), np.arange(4) % 2, np.float32([0.5, 1.0, 2.0, 4.0])
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")
    params = jnp.ones((3, 4))
    state = tx.init(params)

    def loss(params, batch):
        errors = optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ params, batch["y"])
        return jnp.mean(errors * jnp.asarray(batch["weights"])[batch["y"]])

    batch = {"x": x, "y": y, "weights": weights}
    with pytest.raises(ValueError, match="got argument 1/weights, of shape .* in an argument of its own"):
        jaxmp.value_and_grad(loss, accumulate=2)(params, batch, opt_state=state)

    def apart(params, batch, weights):
        return loss(params, batch | {"weights": weights})

    del batch["weights"]
    whole = jax.jit(jax.value_and_grad(apart))(params, batch, weights)
    grad_fn = jax.jit(jaxmp.value_and_grad(apart, accumulate=2, accumulate_argnums=1))
    cut = grad_fn(params, batch, weights, opt_state=state)
    np.testing.assert_allclose(cut[0], whole[0], rtol=1e-6)
    np.testing.assert_allclose(cut[1], whole[1], rtol=1e-5, atol=1e-7)
    jaxmp.value_and_grad(lambda p, b: loss(p, b | {"weights": weights}), accumulate=2)(params, batch, opt_state=state)


# Statistics that nobody named


def stats_loss(params, stats, batch):
    x, y = batch
    mean = 0.9 * stats["mean"] + 0.1 * x.mean(0)
    loss = jnp.mean(((x - mean[None]) @ params["w"] - y) ** 2)
    return loss, {"mean": mean}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("features", [4, 8, 6])
@pytest.mark.parametrize("others", [False, True])
def test_forgotten_statistics_are_named(features, others):
    """They are as long as the batch, longer, or of a length that the number of microbatches does not divide."""
    rows = {4: 8, 8: 8, 6: 8}[features]
    params, stats = {"w": jnp.ones((features, 1))}, {"mean": jnp.zeros(features)}
    batch = (jnp.ones((rows, features)), jnp.ones((rows, 1)))
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(params)

    def loss_fn(params, stats, batch):
        loss, stats = stats_loss(params, stats, batch)
        return (loss, (stats, loss)) if others else (loss, stats)

    with pytest.raises(ValueError, match=r"got argument 1, which the loss returns anew in aux.*carry_argnum=1"):
        jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=4)(params, stats, batch, opt_state=opt_state)
    jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=4, carry_argnum=1)(params, stats, batch, opt_state=opt_state)


def test_other_errors_stay_as_they_are():
    params, x = {"w": jnp.ones((4, 1))}, jnp.ones((8, 4))
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(params)

    def reconstructs(params, x, y):
        return jnp.mean((x @ params["w"] - y) ** 2), x * 2

    grad_fn = jaxmp.value_and_grad(reconstructs, has_aux=True, accumulate=3)
    with pytest.raises(ValueError, match="accumulate=3 must divide"):
        grad_fn(params, x, jnp.ones((8, 1)), opt_state=opt_state)


# The arguments are looked at once


def test_a_batch_is_looked_at_once_for_each_of_its_shapes():
    params = {"w": jnp.ones((4, 1))}
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(params)
    calls = []

    def loss_fn(params, x, y, *, scale=1.0):
        calls.append(1)
        return jnp.mean((x @ params["w"] - y) ** 2) * scale

    grad_fn = jaxmp.value_and_grad(loss_fn, accumulate=2)

    def traces(rows, **kwargs):
        calls.clear()
        grad_fn(params, jnp.ones((rows, 4)), jnp.ones((rows, 1)), opt_state=opt_state, **kwargs)
        return len(calls)

    first, again, longer, longer_again, scaled = traces(8), traces(8), traces(12), traces(12), traces(8, scale=2.0)
    assert again == longer_again < first == longer == scaled

    def misread(params, x, weights):
        return jnp.mean(x @ params["w"]) * jnp.sum(weights)

    grad_fn = jaxmp.value_and_grad(misread, accumulate=2)
    for _ in range(2):  # an error comes again
        with pytest.raises(ValueError, match="must know which arguments hold the batch"):
            grad_fn(params, jnp.ones((8, 4)), jnp.ones(8), opt_state=opt_state)


# --- a batch, or a part of it, that is passed on whole ----------------------------------------------------------------


def nnx_accumulated(loss_fn, *args, k=K, **options):
    model = nnx.Linear(3, N, rngs=nnx.Rngs(0))
    keywords = options.pop("keywords", {})
    of_model = lambda m, *args, **kwargs: loss_fn({"w": m.kernel[...]}, *args, **kwargs)  # noqa: E731
    return jaxmp.nnx.value_and_grad(of_model, accumulate=k, **options)(model, *args, opt_state=STATE, **keywords)


def linen_accumulated(loss_fn, *args, k=K, **options):
    keywords = options.pop("keywords", {})
    return jaxmp.value_and_grad(loss_fn, accumulate=k, **options)(PARAMS, *args, opt_state=STATE, **keywords)


@pytest.mark.parametrize("run", [linen_accumulated, nnx_accumulated], ids=["linen", "nnx"])
def test_a_batch_by_keyword_is_refused(run):
    with pytest.raises(
        ValueError, match=r"accumulate=4 cuts the batch .* positional arguments .* Pass the batch by pos"
    ):
        run(cross_entropy, keywords={"x": X, "y": Y})
    with pytest.raises(ValueError, match="got no array there"):
        run(cross_entropy, X, Y, accumulate_argnums=())


def squares(params, x, targets):
    return jnp.mean(((x @ params["w"])[:, 0] - targets) ** 2)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("k", [4, N])  # with N, one row of x would be broadcast against all targets
@pytest.mark.parametrize("run", [linen_accumulated, nnx_accumulated], ids=["linen", "nnx"])
def test_labels_that_are_passed_on_whole_are_refused(run, k):
    with pytest.raises(ValueError, match=r"got argument 'targets', of as many rows as the batch.* Pass it by position"):
        run(squares, X, k=k, keywords={"targets": TARGETS})
    with pytest.raises(ValueError, match=r"got argument 2, of as many.* Name it too: accumulate_argnums=\(1, 2\)"):
        run(squares, X, TARGETS, k=k, accumulate_argnums=1)


def test_what_goes_with_no_rows_may_be_passed_on_whole():
    """Class weights as long as the batch; a scalar and a string that a loss needs; a loss that knows its size."""
    weights = jnp.asarray(TARGETS)
    by_position, _ = accumulated(cross_entropy, X, Y, weights, accumulate_argnums=(1, 2))
    by_name, _ = linen_accumulated(cross_entropy, X, Y, keywords={"weights": weights})
    assert_within_ulps(by_position, by_name, 16)

    def scaled(params, x, targets, factor, kind):
        assert kind == "mean"
        return squares(params, x, targets) * factor

    linen_accumulated(scaled, X, TARGETS, keywords={"factor": 2.0, "kind": "mean"})

    def knows_its_size(params, x, bias):
        assert len(x) <= N
        return jnp.mean(x @ params["w"]) + jnp.sum(bias)

    linen_accumulated(knows_its_size, X, k=2, keywords={"bias": TARGETS})
