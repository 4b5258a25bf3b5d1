"""With `accumulate=`: which arguments are cut, and what passes through the microbatches."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

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


# --- which arguments hold the batch -----------------------------------------------------------------------------------

WEIGHTS = jnp.linspace(0.1, 2.0, N)  # of classes, as many as rows
MUST_KNOW = r"must know which arguments hold the batch; got 3 that may. Pass accumulate_argnums=\(1, 2, 3\)"


def nnx_accumulated(loss_fn, *args, keywords=None, **options):
    model = nnx.Linear(3, N, rngs=nnx.Rngs(0))
    of_model = lambda m, *args, **kwargs: loss_fn({"w": m.kernel[...]}, *args, **kwargs)  # noqa: E731
    grad_fn = jaxmp.nnx.value_and_grad(of_model, accumulate=K, **options)
    return grad_fn(model, *args, opt_state=STATE, **(keywords or {}))


def linen_accumulated(loss_fn, *args, keywords=None, **options):
    grad_fn = jaxmp.value_and_grad(loss_fn, accumulate=K, **options)
    return grad_fn(PARAMS, *args, opt_state=STATE, **(keywords or {}))


both = pytest.mark.parametrize("run", [linen_accumulated, nnx_accumulated], ids=["linen", "nnx"])


@pytest.mark.thorough(1)
@both
def test_several_arguments_must_be_named(run):
    """Class weights as long as the batch would be cut too, and the loss would be wrong without an error."""
    with pytest.raises(ValueError, match=MUST_KNOW):
        run(cross_entropy, X, Y, WEIGHTS)
    by_keyword, _ = run(cross_entropy, X, Y, accumulate_argnums=(1, 2), keywords={"weights": WEIGHTS})
    loss, _ = run(cross_entropy, X, Y, WEIGHTS, accumulate_argnums=(-2, -3))
    assert_within_ulps(loss, by_keyword, 16)
    if run is linen_accumulated:
        assert_close(loss, cross_entropy(PARAMS, X, Y, WEIGHTS), rtol=1e-6)


def squared(params, x, y):
    return jnp.mean((jnp.sum(x @ params["w"], -1) - y) ** 2)


def test_one_argument_needs_no_name():
    """The carried one does not count."""

    def loss_fn(params, count, batch):
        return squared(params, *batch), count + 1

    compute = jax.jit(jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=K, carry_argnum=1))
    (loss, count), _ = compute(PARAMS, np.int32(0), (X, TARGETS), opt_state=STATE)
    assert_close(loss, squared(PARAMS, X, TARGETS), rtol=1e-6)
    assert int(count) == K


@pytest.mark.parametrize("key", [jax.random.key(0), np.array([0, 7], np.uint32)], ids=["typed", "raw"])
def test_keys_are_split_with_the_batch_and_scalars_repeated(key):
    """Each microbatch draws its own numbers; a raw key beside two rows may be two rows."""

    def drawn(params, x, key, rate):
        return squared(params, x, 0.0), (jax.random.uniform(key), rate)

    def run(x, k):
        grad_fn = jaxmp.value_and_grad(drawn, has_aux=True, accumulate=k, accumulate_argnums=(1, 2, 3))
        return jax.jit(grad_fn)(PARAMS, x, key, 0.5, opt_state=STATE)[0][1]

    numbers, rates = run(X, K)
    assert len(set(numbers.tolist())) == K
    assert rates.tolist() == [0.5] * K
    assert run(X, 1)[0] == jax.random.uniform(key)  # without accumulation the key is the caller's
    if key.dtype == np.uint32:
        with pytest.raises(ValueError, match=r"must be typed .*; got uint32\[2\] at argument 2. Use jax.random.key"):
            run(X[:2], 2)


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


def normed_loss(params, batch_stats, x, y):
    out, new = Normed().apply({"params": params, "batch_stats": batch_stats}, x, mutable=["batch_stats"])
    return jnp.mean((out.astype(jnp.float32) - y) ** 2), new["batch_stats"]


def new_state():
    tx = jaxmp.mixed_precision(optax.sgd(0.01), POLICY)
    return regimes.BatchNormState.create(apply_fn=None, **VARIABLES, tx=tx, policy=POLICY)


def gradients(loss_fn=normed_loss, k=K):
    """`value_and_grad` that carries the statistics through the microbatches."""
    return jaxmp.value_and_grad(loss_fn, has_aux=True, accumulate=k, accumulate_argnums=(2, 3), carry_argnum=1)


def one_after_the_other(params, stats):
    """The statistics after K microbatches, by hand."""
    loss = jax.jit(normed_loss)
    for x, y in zip(np.split(X, K), np.split(TARGETS, K), strict=True):
        stats = loss(params, stats, x, y)[1]
    return stats


@pytest.mark.thorough(1)
@pytest.mark.parametrize("k", [1, K])
def test_batch_statistics_pass_through_the_microbatches(k):
    """One trace for all steps, no further axis, and a skipped step restores them."""
    traces = []

    @jax.jit
    def step(state, x, y):
        traces.append(0)
        (loss, stats), grads = gradients(k=k)(state.params, state.batch_stats, x, y, opt_state=state.opt_state)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    first = new_state()
    state, _ = step(first, X, TARGETS)
    if k == K:
        assert_close(state.batch_stats, one_after_the_other(first.params, first.batch_stats), rtol=2e-2, atol=1e-2)
    state, _ = step(state, X, TARGETS)
    assert len(traces) == 1
    skipped, _ = step(state, np.full_like(X, np.inf), TARGETS)
    assert_moved(skipped.batch_stats, state.batch_stats)


@pytest.mark.parametrize("policy", ["fp32", "bf16-mixed"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("k", [1, K])
def test_a_carried_argument_keeps_its_dtype(policy, dtype, k):
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy).init(PARAMS)

    def loss_fn(params, mean, x, y):
        return jnp.mean((x @ params["w"] - y[:, None]) ** 2), mean * 0.5 + x.mean().astype(jnp.bfloat16)

    compute = jaxmp.value_and_grad(
        loss_fn, has_aux=True, policy=policy, accumulate=k, accumulate_argnums=(2, 3), carry_argnum=1
    )
    (_, mean), _ = compute(PARAMS, jnp.zeros((), dtype), jnp.ones_like(X), TARGETS, opt_state=opt_state)
    assert_exact(mean, np.asarray(2 - 0.5 ** (k - 1), dtype))


def test_aux_beside_the_statistics_is_stacked():
    def loss_fn(params, stats, x, y):
        loss, new = normed_loss(params, stats, x, y)
        return loss, (new, {"loss": loss})

    params, stats = VARIABLES["params"], VARIABLES["batch_stats"]
    (loss, (new, others)), _ = jax.jit(gradients(loss_fn))(params, stats, X, TARGETS, opt_state=STATE)
    assert others["loss"].shape == (K,)
    assert_close(jnp.mean(others["loss"]), loss, rtol=1e-6)
    assert_close(new, one_after_the_other(params, stats), rtol=1e-5, atol=1e-6)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["shard_map", "shard_map_unchecked", "pmap"])
def test_statistics_that_the_loss_averages_over_devices_stay_replicated(how):
    """As without microbatches, `out_specs=P()` takes them. Those of own rows vary, some one microbatch later."""
    axis, n, k = regimes.AXIS, regimes.DEVICES, 3

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
    args = VARIABLES["params"], VARIABLES["batch_stats"], X, TARGETS
    with pytest.raises(ValueError, match=r"with carry_argnum= the loss must return .*; got has_aux=False"):
        jaxmp.value_and_grad(normed_loss, carry_argnum=1)(*args, opt_state=STATE)
    wrong = lambda params, *args: (jnp.sum(params["Dense_0"]["bias"]), {"other": 1.0})  # noqa: E731
    with pytest.raises(ValueError, match="other is in aux only"):
        jaxmp.value_and_grad(wrong, has_aux=True, carry_argnum=1)(*args, opt_state=STATE)


def test_stacked_statistics_are_refused():
    """Without carry_argnum: each step would add an axis."""
    compute = jaxmp.value_and_grad(normed_loss, has_aux=True, accumulate=K, accumulate_argnums=(2, 3))

    def step(state):
        (_, stats), grads = compute(state.params, state.batch_stats, X, TARGETS, opt_state=state.opt_state)
        return state.apply_gradients(grads=grads, batch_stats=stats)

    with pytest.raises(ValueError, match=r"got \(4, 4\) in new and \(4,\) in old at batch_stats/.*carry_argnum="):
        jax.eval_shape(step, new_state())
    with pytest.raises(ValueError, match=r"got \(2,\) in new and \(1,\) in old at mean"):
        jaxmp.keep_if_skipped(STATE, {"mean": np.zeros(2)}, {"mean": np.zeros(1)})


# --- a batch that is not there ----------------------------------------------------------------------------------------


@both
def test_a_batch_by_keyword_is_refused(run):
    with pytest.raises(
        ValueError, match=r"accumulate=4 must get the batch by position; got no array there. Call value_and_grad"
    ):
        run(cross_entropy, keywords={"x": X, "y": Y})
    with pytest.raises(ValueError, match="got no array there"):
        run(cross_entropy, X, Y, accumulate_argnums=())
