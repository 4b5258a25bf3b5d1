"""flax.nnx modules: Optimizer, state that moves in the forward pass, metadata, shared and lifted layers."""

import functools
import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_same_program
from matmul_dtypes import matmuls
from regimes import guarded, squared_error

F16, F32 = np.float16, np.float32
POLICY = jaxmp.get_policy("fp16", keep_fp32=("*norm*",))
X, Y = np.random.default_rng(0).normal(size=(2, 8, 4)).astype(F32)
BAD_X = X.copy()
BAD_X[3, 1] = np.inf


class Net(nnx.Module):
    """BatchNorm and Dropout, whose integer key counts make flax's DynamicScale raise a TypeError."""

    def __init__(self, rngs):
        self.inner = nnx.Linear(4, 4, use_bias=False, dtype=jnp.float16, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, dtype=jnp.float16, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.outer = nnx.Linear(4, 4, use_bias=False, dtype=jnp.float16, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(self.norm(self.inner(x))))


def make():
    """A model and flax's own optimizer."""
    model = Net(nnx.Rngs(0))
    scale = jaxmp.DynamicLossScale(4.0, hysteresis=1)
    tx = jaxmp.mixed_precision(optax.sgd(0.25, momentum=0.5), POLICY, loss_scale=scale)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, POLICY)
    return model, optimizer


def linear():
    return nnx.Linear(3, 2, rngs=nnx.Rngs(0))


def layers_of_16(n):
    return nnx.Sequential(*(nnx.Linear(16, 16, rngs=nnx.Rngs(i)) for i in range(n)))


def loss_fn(model, x, y):
    return squared_error(model(x), y)


def mean_square(model, x):
    return jnp.mean(model(x) ** 2)


@functools.cache
def step_of(accumulate):
    @nnx.jit
    def step(model, optimizer, x, y):
        before = jaxmp.nnx.snapshot(model)
        loss, grads = jaxmp.nnx.value_and_grad(loss_fn, accumulate=accumulate, accumulate_argnums=(1, 2))(
            model, x, y, opt_state=optimizer.opt_state
        )
        optimizer.update(model, grads)
        jaxmp.nnx.restore_if_skipped(optimizer.opt_state, model, before)
        return loss, grads

    return step


def state_of(x, *filters):
    """A copy of the arrays of a module, as a pure tree."""
    return jax.tree.map(np.asarray, nnx.as_pure(jax.tree.map(key_data_of, nnx.state(x, *filters))))


def key_data_of(x):
    return jax.random.key_data(x) if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def guarded_of(optimizer):
    return jax.tree.map(np.asarray, guarded(nnx.as_pure(optimizer.opt_state)))


def masters_of(model, optimizer, wrt=nnx.Param):
    masters = jaxmp.get_master_params(optimizer.opt_state, nnx.state(model, wrt))
    return jax.tree.map(np.asarray, nnx.as_pure(masters))


def test_cast_to_param_follows_the_policy_leaves_all_else_and_masters_keep_the_initial_values():
    before = state_of(Net(nnx.Rngs(0)))
    model, optimizer = make()
    dtypes = jax.tree.map(lambda x: str(x.dtype), state_of(model, nnx.Param))
    assert dtypes == {
        "inner": {"kernel": "float16"},
        "norm": {"scale": "float32", "bias": "float32"},
        "outer": {"kernel": "float16"},
    }
    after = state_of(model)
    assert_moved(after["norm"]["mean"], before["norm"]["mean"])
    assert_moved(after["dropout"], before["dropout"])
    assert_exact(after["inner"]["kernel"], before["inner"]["kernel"].astype(F16))
    assert np.any(after["inner"]["kernel"] != before["inner"]["kernel"])
    assert_moved(masters_of(model, optimizer)["inner"], before["inner"])


def test_batch_norm_and_dropout_train_and_a_skipped_step_is_taken_back():
    model, optimizer = make()
    step = step_of(1)
    loss, grads = step(model, optimizer, X, Y)
    assert loss.dtype == F32 and nnx.as_pure(grads)["inner"]["kernel"].dtype == F16
    metrics = jaxmp.get_metrics(optimizer.opt_state)
    assert_exact((metrics["skipped"], metrics["loss_scale"]), (np.bool_(False), F32(4.0)))
    statistics, count = state_of(model, nnx.BatchStat), state_of(model, nnx.RngCount)
    assert np.any(statistics["norm"]["mean"] != 0)
    before = state_of(model, nnx.Param), guarded_of(optimizer)

    loss, _ = step(model, optimizer, BAD_X, Y)
    assert not np.isfinite(loss)
    assert_moved((state_of(model, nnx.Param), guarded_of(optimizer)), before)
    assert_moved(state_of(model, nnx.BatchStat), statistics)
    metrics = jaxmp.get_metrics(optimizer.opt_state)
    assert_exact((metrics["skipped_steps"], metrics["loss_scale"]), (np.int32(1), F32(2.0)))
    # keys go on: the batch is not drawn again with the same mask
    assert_exact(state_of(model, nnx.RngCount), jax.tree.map(lambda c: c + np.uint32(1), count))

    last, _ = step(model, optimizer, X, Y)
    assert np.isfinite(last)
    assert_exact(state_of(model, nnx.Param), POLICY.cast_to_param(masters_of(model, optimizer)))


def test_snapshot_and_restore_of_chosen_variables():
    @nnx.jit
    def step_without_restore(model, optimizer, x, y):
        before = jaxmp.nnx.snapshot(model, nnx.BatchStat, nnx.RngCount)
        _, grads = jaxmp.nnx.value_and_grad(loss_fn)(model, x, y, opt_state=optimizer.opt_state)
        optimizer.update(model, grads)
        return before

    model, optimizer = make()
    counts, mean = state_of(model, nnx.RngCount), np.asarray(model.norm.mean[...])
    before = step_without_restore(model, optimizer, BAD_X, Y)
    assert not np.all(np.isfinite(model.norm.mean[...]))  # as flax leaves it
    assert np.all(np.isfinite(model.inner.kernel[...]))
    assert_exact(state_of(model, nnx.RngCount), jax.tree.map(lambda c: c + np.uint32(1), counts))
    jaxmp.nnx.restore_if_skipped(optimizer.opt_state, model, before)
    assert_moved(state_of(model, nnx.RngCount), counts)
    assert_moved(model.norm.mean[...], mean)
    # a step that was taken keeps what it did
    before = step_without_restore(model, optimizer, X, Y)
    after = state_of(model)
    jaxmp.nnx.restore_if_skipped(optimizer.opt_state, model, before)
    assert_moved(state_of(model), after)


@pytest.mark.thorough(0)
def test_loss_and_gradients_are_those_of_nnx():
    """In float32 with a power-of-two scale, up to the association of products."""
    model = Net(nnx.Rngs(0))
    theirs = nnx.clone(model)
    expected, their_grads = nnx.jit(nnx.value_and_grad(loss_fn))(theirs, X, Y)
    opt_state = jaxmp.unscale_and_skip(optax.identity(), 8.0).init(())
    compute = jaxmp.nnx.value_and_grad(loss_fn)
    loss, grads = nnx.jit(lambda model, x, y: compute(model, x, y, opt_state=opt_state))(model, X, Y)
    assert_close(loss, expected, rtol=1e-6)
    assert jax.tree.structure(grads) == jax.tree.structure(their_grads)
    unscaled = jax.tree.map(lambda g: g / 8, nnx.as_pure(grads))
    assert_close(unscaled, nnx.as_pure(their_grads), rtol=1e-2, atol=1e-4)
    # the module's other state moved as theirs did
    assert_close(state_of(model, nnx.BatchStat), state_of(theirs, nnx.BatchStat), rtol=1e-6)
    assert_exact(state_of(model, nnx.RngState), state_of(theirs, nnx.RngState))


@pytest.mark.thorough(0)
def test_accumulation_passes_state_through_the_microbatches():
    model, optimizer = make()
    one_by_one = nnx.clone(model)
    loss, _ = step_of(2)(model, optimizer, X, Y)
    run = nnx.jit(loss_fn)
    halves = [run(one_by_one, x, y) for x, y in zip(np.split(X, 2), np.split(Y, 2), strict=True)]
    assert_close(loss, F32(sum(halves) / 2), rtol=1e-3)
    assert_close(state_of(model, nnx.BatchStat), state_of(one_by_one, nnx.BatchStat), rtol=1e-3, atol=1e-5)
    assert_exact(state_of(model, nnx.RngCount), state_of(one_by_one, nnx.RngCount))  # another mask each time

    before = state_of(model, nnx.Param), state_of(model, nnx.BatchStat), guarded_of(optimizer)
    step_of(2)(model, optimizer, BAD_X, Y)  # in the first microbatch: the statistics of both are taken back
    assert_moved((state_of(model, nnx.Param), state_of(model, nnx.BatchStat), guarded_of(optimizer)), before)


def test_accumulated_gradients_are_float32_means():
    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(np.array([1.0], F16))

        def __call__(self, x):
            return x * self.w[...]

    def loss_fn(model, x, *, shift):
        return jnp.mean(model(x).astype(F32)) + shift, {"rows": x}

    model, opt_state = Scale(), jaxmp.unscale_and_skip(optax.identity(), 4.0).init(())
    compute = jaxmp.nnx.value_and_grad(loss_fn, has_aux=True, accumulate=4)
    x = np.full((4,), 2.0**15, F16)  # their sum is inf in float16
    (loss, aux), grads = compute(model, x, shift=1.0, opt_state=opt_state)
    assert_exact((loss, nnx.as_pure(grads)["w"]), (F32(2.0**15 + 1), np.array([2.0**17], F32)))
    assert_moved(aux["rows"], np.full((4, 1), 2.0**15, F16))
    with pytest.raises(ValueError, match=r"must not name differentiated or carried arguments; got \(0, 1\)"):
        jaxmp.nnx.value_and_grad(loss_fn, accumulate=2, accumulate_argnums=(0, 1))(model, x, opt_state=opt_state)


class Recurrent(nnx.Module):
    """Its state is set from an activation, which a policy computes in 16 bits."""

    def __init__(self):
        self.linear, self.last = nnx.Linear(4, 4, rngs=nnx.Rngs(0)), nnx.Variable(jnp.zeros(4))
        self.norm = nnx.SpectralNorm(self.linear, rngs=nnx.Rngs(1))

    def __call__(self, x, sows=False):
        y = self.norm(x + self.last[...].astype(x.dtype)[None], update_stats=True)
        self.last[...] = y[-1]
        if sows:
            self.seen = nnx.Intermediate(y)
        return y


@pytest.mark.parametrize("accumulate", [1, 4])
def test_state_of_a_module_keeps_its_dtypes_under_a_policy(accumulate):
    model, x = Recurrent(), np.ones((8, 4), F32)
    optimizer = jaxmp.nnx.Optimizer(model, optax.sgd(0.1), policy="bf16")
    loss_fn = lambda model, x, **kwargs: jnp.mean(model(x, **kwargs) ** 2)  # noqa: E731
    compute = jaxmp.nnx.value_and_grad(loss_fn, accumulate=accumulate)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = compute(model, x, opt_state=optimizer)
        optimizer.update(model, grads)
        return loss

    before = jax.tree.map(jax.typeof, nnx.state(model, nnx.Not(nnx.Param)))
    for _ in range(2):
        step(model, optimizer, x)
        assert jax.tree.map(jax.typeof, nnx.state(model, nnx.Not(nnx.Param))) == before
    assert model.norm.batch_stats[("kernel", "sigma")][...] > 1 and np.all(np.asarray(model.last[...]) != 0)
    if accumulate > 1:
        with pytest.raises(ValueError, match="/seen.* is in the state after a microbatch only. .* cannot add state"):
            compute(model, x, opt_state=optimizer, sows=True)
    else:
        compute(model, x, opt_state=optimizer, sows=True)
        assert model.seen[...].shape == x.shape


def test_extra_arguments_reach_the_optimizer_and_nan_stays_out():
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    inner = optax.chain(optax.sgd(1.0), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    optimizer = nnx.Optimizer(model, jaxmp.mixed_precision(inner, "fp16", loss_scale=2.0), wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, "fp16")
    good = jax.tree.map(lambda p: np.full(p.shape, 0.5, F16), nnx.state(model, nnx.Param))
    update = nnx.jit(lambda optimizer, model, grads, value: optimizer.update(model, grads, value=value))
    for _ in range(2):
        update(optimizer, model, good, F32(1.0))
    assert_exact(optax.tree.get(nnx.as_pure(optimizer.opt_state), "scale"), F32(0.5))
    before = guarded_of(optimizer)
    update(optimizer, model, jax.tree.map(lambda g: np.full_like(g, np.inf), good), F32(np.nan))
    assert_moved(guarded_of(optimizer), before)
    assert_exact(jaxmp.get_metrics(optimizer.opt_state)["skipped"], np.bool_(True))


@pytest.mark.thorough(0)
def test_sharding_metadata_carries_over_to_masters_and_moments():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    columns = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    ones = nnx.with_partitioning(nnx.initializers.ones, ("model",))
    policy = jaxmp.get_policy("fp16", keep_fp32=("norm*",))

    class Split(nnx.Module):
        def __init__(self, rngs):
            options = {"use_bias": False, "dtype": jnp.float16, "rngs": rngs}
            self.dense = nnx.Linear(4, 8, kernel_init=columns, **options)
            self.norm = nnx.LayerNorm(8, scale_init=ones, **options)

        def __call__(self, x):
            return self.norm(self.dense(x))

    with jax.set_mesh(mesh):
        model = Split(nnx.Rngs(0))
        tx = jaxmp.mixed_precision(optax.adam(1e-2), policy, loss_scale=4.0)
        optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
        jaxmp.nnx.cast_to_param(model, policy)
        specs = nnx.as_pure(nnx.get_partition_spec(nnx.state(optimizer)))["opt_state"]
        expected = {"dense": {"kernel": P(None, "model")}, "norm": {"scale": P("model")}}
        assert specs["master_params"]["dense"] == expected["dense"]
        for moment in ("mu", "nu"):
            assert specs["optimizer_state"][0][moment] == expected
        assert model.dense.kernel.get_metadata()["out_sharding"] == (None, "model")
        dtypes = [x.dtype for x in jax.tree.leaves(nnx.state((model, optimizer)))]

        @nnx.jit
        def step(model, optimizer, x):
            loss, grads = jaxmp.nnx.value_and_grad(lambda m, x: jnp.mean(m(x).astype(F32) ** 3))(
                model, x, opt_state=optimizer.opt_state
            )
            optimizer.update(model, grads)
            return loss

        first, second = step(model, optimizer, X), step(model, optimizer, X)
    assert second < first
    assert [x.dtype for x in jax.tree.leaves(nnx.state((model, optimizer)))] == dtypes
    opt_state = nnx.as_pure(optimizer.opt_state)
    for tree in (opt_state.master_params, optax.tree.get(opt_state, "mu")):
        array = tree["dense"]["kernel"]
        assert array.sharding.is_equivalent_to(model.dense.kernel[...].sharding, 2)
        assert not array.is_fully_replicated
    assert_exact(state_of(model, nnx.Param), policy.cast_to_param(masters_of(model, optimizer)))


class SharedAndLifted(nnx.Module):
    """One layer under two names, an embedding that is the output layer too, a scan over layers that are computed again.

    The params of these layers are stacked.
    """

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make_layers(rngs):
            return nnx.Linear(4, 4, use_bias=False, dtype=jnp.float16, rngs=rngs)

        self.embed = nnx.Embed(5, 4, dtype=jnp.float16, rngs=rngs)
        self.first = nnx.Linear(4, 4, use_bias=False, dtype=jnp.float16, rngs=rngs)
        self.again = self.first
        self.layers = make_layers(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def forward(layer, x):
            return x + layer(x)

        return self.embed.attend(forward(self.layers, self.again(self.first(self.embed(x)))))


@pytest.mark.thorough(0)
def test_shared_and_lifted_modules_train():
    x, y = np.arange(5), np.eye(5, dtype=F32)
    model = SharedAndLifted(nnx.Rngs(0))
    exact = nnx.jit(nnx.grad(loss_fn))(nnx.clone(model), x, y)
    scale = jaxmp.DynamicLossScale(2.0**8, hysteresis=1)
    optimizer = nnx.Optimizer(model, jaxmp.mixed_precision(optax.adam(0.03), "fp16", loss_scale=scale), wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, "fp16")

    @nnx.jit
    def step(model, optimizer, factor):
        loss, grads = jaxmp.nnx.value_and_grad(lambda m: loss_fn(m, x, y) * factor)(
            model, opt_state=optimizer.opt_state
        )
        optimizer.update(model, grads)
        return loss, grads

    first, grads = step(model, optimizer, 1.0)
    unscaled = jax.tree.map(lambda g: np.float32(g) / F32(2.0**8), nnx.as_pure(grads))
    largest = max(float(np.max(np.abs(g))) for g in jax.tree.leaves(exact))
    assert_close(unscaled, nnx.as_pure(exact), atol=0.02 * largest)
    assert set(unscaled) == {"embed", "again", "layers"}  # the shared layer has one gradient and one master
    before = state_of(model, nnx.Param), guarded_of(optimizer)
    step(model, optimizer, np.nan)
    assert_moved((state_of(model, nnx.Param), guarded_of(optimizer)), before)
    for _ in range(20):
        last, _ = step(model, optimizer, 1.0)
    assert last < 0.5 * first
    assert model.again is model.first
    assert_exact(state_of(model, nnx.Param), jaxmp.get_policy("fp16").cast_to_param(masters_of(model, optimizer)))


# State that holds tuples of arrays: moments in 8 bits and split masters


class Wide(nnx.Module):
    """A kernel that is large enough for moments in 8 bits, and a small layer."""

    def __init__(self, rngs):
        self.base = nnx.Linear(32, 128, rngs=rngs)
        self.head = nnx.Linear(128, 2, rngs=rngs)

    def __call__(self, x):
        return self.head(self.base(x))


def label_head_frozen(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "frozen" if "head" in str(path[0]) else "trained", params)


WIDE_X = np.random.default_rng(0).normal(size=(4, 32)).astype(F32)
FUSED = jaxmp.fused_adamw(1e-3, state_dtype=jnp.int8), {"remainder_bits": 8}
FROZEN_HEAD = (
    optax.multi_transform(
        {"trained": jaxmp.compress_moments(optax.adam(1e-3), jnp.int8), "frozen": optax.set_to_zero()},
        label_head_frozen,
    ),
    {},
)


def wide(inner, options, cls=jaxmp.nnx.Optimizer):
    tx = jaxmp.mixed_precision(inner, "bf16", **options)
    model = Wide(nnx.Rngs(0))
    if cls is nnx.Optimizer:
        optimizer = cls(model, tx, wrt=nnx.Param)
        jaxmp.nnx.cast_to_param(model, "bf16")
        return model, optimizer
    return model, cls(model, tx, policy="bf16")


def wide_step(model, optimizer, x):
    def loss_fn(model, x):
        return jnp.mean(model(x).astype(jnp.float32) ** 2)

    loss, grads = jaxmp.nnx.value_and_grad(loss_fn, policy="bf16")(model, x, opt_state=optimizer.opt_state)
    optimizer.update(model, grads)
    return loss


@pytest.mark.thorough(0)
@pytest.mark.parametrize("scanned", [True, False], ids=["fused, ours, scanned", "frozen head, flax"])
def test_state_keeps_its_structure_from_the_first_step_on(scanned):
    """Tuples stay tuples: one trace serves, and a scan over steps."""
    make_wide = functools.partial(wide, *FUSED) if scanned else functools.partial(wide, *FROZEN_HEAD, nnx.Optimizer)
    model, optimizer = make_wide()
    structure = jax.tree.structure(nnx.state(optimizer))
    traces = []

    @nnx.jit
    def step(model, optimizer, x):
        traces.append(0)
        return wide_step(model, optimizer, x)

    losses = [float(step(model, optimizer, WIDE_X)) for _ in range(3)]
    assert len(traces) == 1 and losses[2] < losses[1] < losses[0]
    assert jax.tree.structure(nnx.state(optimizer)) == structure
    if scanned:
        scan = nnx.scan(lambda carry, x: (carry, wide_step(*carry, x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
        _, by_scan = nnx.jit(scan)(make_wide(), np.stack([WIDE_X] * 3))
        np.testing.assert_allclose(by_scan, losses, rtol=1e-2)


@pytest.mark.thorough(0)
def test_a_job_goes_on_beside_a_frozen_part(tmp_path):
    """Each Variable of the state has one array, also beside a frozen part."""
    model, optimizer = wide(*FROZEN_HEAD)
    step = nnx.jit(wide_step)
    step(model, optimizer, WIDE_X)
    with jaxmp.checkpoint.manager(tmp_path / "steps") as steps:
        rest = {"rest": nnx.state(model, nnx.Not(optimizer.wrt)), "step": optimizer.step[...]}
        params = nnx.state(model, optimizer.wrt)
        jaxmp.checkpoint.save(steps, 1, params=params, opt_state=optimizer.opt_state, extra=rest)
        fresh, fresh_optimizer = wide(*FROZEN_HEAD)
        params = nnx.state(fresh, optimizer.wrt)
        restored = jaxmp.checkpoint.restore(steps, fresh_optimizer.tx, params=params, extra=rest)
        nnx.update(fresh, restored.params, restored.extra["rest"])
        nnx.update(fresh_optimizer.opt_state, nnx.state(restored.opt_state))
        fresh_optimizer.step[...] = restored.extra["step"]
    states = [jax.tree.leaves(nnx.as_pure(o.opt_state)) for o in (fresh_optimizer, optimizer)]
    assert_moved(*states)
    assert_same_program(step(fresh, fresh_optimizer, WIDE_X), step(model, optimizer, WIDE_X))


# The policy


class Plain(nnx.Module):
    """No dtype anywhere; batch statistics and dropout move in the forward pass."""

    def __init__(self, rngs):
        self.inner, self.outer = nnx.Linear(8, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(8, rngs=rngs), nnx.Dropout(0.25, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(self.norm(self.inner(x))))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("named", "accumulate"), [(True, 1), (False, 2)], ids=["policy=", "opt_state=optimizer"])
def test_the_loss_runs_in_the_precision_of_the_policy(named, accumulate):
    model = Plain(nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "fp16"), policy="fp16")
    graphdef, state = nnx.split((model, optimizer))

    def step(state):
        model, optimizer = nnx.merge(graphdef, state)
        options = {"policy": "fp16"} if named else {}
        grad_fn = jaxmp.nnx.value_and_grad(loss_fn, accumulate=accumulate, accumulate_argnums=(1, 2), **options)
        before = model.norm.mean[...], model.dropout.rngs.count[...]
        holder = optimizer.opt_state if named else optimizer
        loss, grads = grad_fn(model, np.concatenate([X, X], 1), Y, opt_state=holder)
        optimizer.update(model, grads)
        after = model.norm.mean[...], model.dropout.rngs.count[...]
        return nnx.state((model, optimizer)), loss, [jnp.any(a != b) for a, b in zip(before, after, strict=True)]

    assert matmuls(step, state) == {"float16": 5}
    _, loss, moved = jax.jit(step)(state)
    assert loss.dtype == F32 and all(moved)


def test_fp8_layers_of_nnx_under_the_policy():
    model = layers_of_16(3)
    assert jaxmp.nnx.to_fp8(model) == ["layers/1"]
    optimizer = jaxmp.nnx.Optimizer(model, jaxmp.mixed_precision(optax.sgd(0.1), "fp8"), policy="fp8")
    graphdef, state = nnx.split((model, optimizer))

    def gradients(state, x):
        model, optimizer = nnx.merge(graphdef, state)
        grad_fn = jaxmp.nnx.value_and_grad(mean_square, policy="fp8")
        return nnx.as_pure(grad_fn(model, x, opt_state=optimizer.opt_state))

    dtypes = matmuls(gradients, state, np.ones((16, 16), F32))
    assert dtypes == {"bfloat16": 5, "float8_e4m3fn": 1, "float8_e4m3fnxfloat8_e5m2": 2}


@pytest.mark.parametrize(
    ("cls", "policy"), [(jaxmp.nnx.Optimizer, "bf16"), (nnx.Optimizer, "fp8")], ids=["ours", "flax, some in fp8"]
)
def test_layers_that_are_turned_to_fp8_after_the_optimizer_was_made_are_named(policy, cls):
    model = nnx.List([nnx.Linear(16, 16, rngs=nnx.Rngs(0)) for _ in range(3)])
    if policy == "fp8":
        jaxmp.nnx.to_fp8(model, filter="2")
    optimizer = cls(model, jaxmp.mixed_precision(optax.sgd(0.1), policy), wrt=nnx.Param)
    jaxmp.nnx.to_fp8(model, filter="*")
    grads = jax.tree.map(np.zeros_like, nnx.state(model, nnx.Param))
    with pytest.raises(ValueError, match=r"got a new .*0/dot_general/fp8_\w+. Make the optimizer last.*fp8"):
        optimizer.update(model, grads)


def test_the_filter_may_come_as_flax_s_diff_state():
    model = linear()
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(nnx.state(model, nnx.Param))

    def run(**options):
        grad_fn = jaxmp.nnx.value_and_grad(mean_square, **options)
        return grad_fn(model, np.ones((4, 3), F32), opt_state=opt_state)[1]

    def is_bias(path, value):
        return "bias" in path

    assert_same_program(run(argnums=nnx.DiffState(0, is_bias)), run(wrt=is_bias))
    assert list(run(argnums=nnx.DiffState(0, is_bias))) == ["bias"]
    assert_same_program(run(argnums=0), run())
    for options in ({"argnums": 1}, {"argnums": nnx.DiffState(1, nnx.Param)}, {"argnums": (0, 1)}):
        with pytest.raises(ValueError, match="argnums must be 0, the module; got "):
            run(**options)
    with pytest.raises(TypeError, match=r"wrt must be a filter; got an nnx.DiffState. Pass argnums=nnx.DiffState\(0"):
        run(wrt=nnx.DiffState(0, nnx.Param))
    with pytest.raises(ValueError, match="must be said once; got .* and wrt="):
        run(argnums=nnx.DiffState(0, nnx.Param), wrt=is_bias)


def test_keywords_of_a_step_are_in_its_signature():
    """Libraries that bind arguments by the signature, as equinox.filter_jit does, find opt_state."""

    def loss_fn(params, x, *, key=None):
        return jnp.sum(params * x)

    for value_and_grad in (jaxmp.value_and_grad, jaxmp.nnx.value_and_grad):
        assert str(inspect.signature(value_and_grad(loss_fn))) == "(params, x, *, key=None, opt_state=None)"
        assert str(inspect.signature(value_and_grad(lambda p, **more: p))) == "(p, *, opt_state=None, **more)"
        assert value_and_grad(loss_fn).__name__ == "loss_fn"
    params, x = jnp.ones(3), jnp.ones(3)
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(params)
    loss, _ = eqx.filter_jit(jaxmp.value_and_grad(loss_fn))(params, x, opt_state=opt_state)
    assert float(loss) == 3.0


# Filters


class Adapted(nnx.Module):
    def __init__(self, rngs):
        self.base = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)
        self.stats = nnx.BatchNorm(4, rngs=rngs)
        self.lora = nnx.LoRA(4, 2, 4, b_initializer=nnx.initializers.normal(), rngs=rngs)

    def __call__(self, x):
        return self.stats(self.norm(self.base(x) + self.lora(x)))


def test_an_optimizer_of_adapters_stores_the_frozen_base_in_16_bits():
    """And differentiates with respect to what `wrt` names."""
    model = Adapted(nnx.Rngs(0))
    base, adapter = np.asarray(model.base.kernel[...]), np.asarray(model.lora.lora_b[...])
    optimizer = jaxmp.nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam, policy="bf16", keep_fp32="norm/*")
    assert_exact(model.base.kernel[...], base.astype(jnp.bfloat16))
    assert model.norm.scale[...].dtype == jnp.float32  # keep_fp32 names it
    assert model.stats.mean[...].dtype == jnp.float32  # no nnx.Param
    masters = optimizer.master_params(model)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(masters)] == [((4, 2), F32), ((2, 4), F32)]

    @nnx.jit
    def step(model, optimizer, x):
        grad_fn = jaxmp.nnx.value_and_grad(mean_square, wrt=nnx.LoRAParam)
        grads = grad_fn(model, x, opt_state=optimizer)[1]
        optimizer.update(model, grads)
        return grads

    assert set(nnx.as_pure(step(model, optimizer, X))) == {"lora"}
    assert_exact(model.base.kernel[...], base.astype(jnp.bfloat16))
    assert np.any(np.asarray(optimizer.master_params(model)["lora"]["lora_b"]) != adapter)
    nnx.update(model, jaxmp.get_policy("fp32").cast_to_param(nnx.state(model, nnx.Param)))
    optimizer.reload_master_params(model)
    assert model.base.kernel[...].dtype == jnp.bfloat16


def test_which_filters_leave_a_frozen_base_and_which_leave_params_to_another_optimizer():
    """Kinds of params do the first, a filter of paths the second."""

    def optimizer_of(model, wrt):
        return jaxmp.nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt, policy="bf16")

    for kinds in (nnx.Any(nnx.LoRAParam, jaxmp.nnx.Fp8Scale), (nnx.LoRAParam,)):
        model = Adapted(nnx.Rngs(0))
        optimizer_of(model, kinds)
        assert model.base.kernel[...].dtype == model.norm.scale[...].dtype == jnp.bfloat16

    model = Adapted(nnx.Rngs(0))
    kernel = model.lora.lora_a[...]
    optimizer_of(model, nnx.All(nnx.Param, nnx.PathContains("base")))
    assert model.base.kernel[...].dtype == jnp.bfloat16 and model.lora.lora_a[...].dtype == jnp.float32
    rest = nnx.All(nnx.Param, nnx.Not(nnx.PathContains("base")))
    assert_exact(masters_of(model, optimizer_of(model, rest), rest)["lora"]["lora_a"], np.asarray(kernel))
