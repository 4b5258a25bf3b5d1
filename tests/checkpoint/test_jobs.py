"""A whole job in one call: what a run had goes on in a new one, bit for bit."""

import traceback
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from flax.training import train_state

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp import checkpoint
from jaxmp._src.checkpoint import writer as checkpoint_writer

POLICY = jaxmp.get_policy("fp16")
X = jax.random.normal(jax.random.key(0), (8, 4))


def make_tx():
    return jaxmp.mixed_precision(optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9)), POLICY, loss_scale=2.0**4)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train=True):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(8)(x))
        return nn.Dense(1)(nn.Dropout(0.5, deterministic=not train)(x))


class WithStats(jaxmp.linen.TrainState):
    batch_stats: Any
    key: Any


class PlainWithStats(train_state.TrainState):
    batch_stats: Any
    key: Any


def linen_job(kind, seed):
    net = Net()
    variables = jax.jit(net.init)({"params": jax.random.key(seed), "dropout": jax.random.key(1)}, X)
    kwargs = {"apply_fn": net.apply, "batch_stats": variables["batch_stats"], "key": jax.random.key(seed)}
    if kind is WithStats:
        return WithStats.create(params=variables["params"], tx=make_tx(), policy=POLICY, **kwargs)
    return PlainWithStats.create(params=variables["params"], tx=optax.adam(1e-2), **kwargs)


@jax.jit
def linen_step(state):
    key, dropout = jax.random.split(state.key)

    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, X, mutable=["batch_stats"], rngs={"dropout": dropout})
        return jnp.mean(out.astype(jnp.float32) ** 2), new["batch_stats"]

    if isinstance(state, PlainWithStats):
        (_, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    else:
        (_, stats), grads = jaxmp.value_and_grad(loss_fn, has_aux=True)(state.params, opt_state=state.opt_state)
    return state.apply_gradients(grads=grads, batch_stats=stats).replace(key=key)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kind", [WithStats, PlainWithStats], ids=["jaxmp", "flax"])
def test_a_train_state_goes_on(kind, tmp_path):
    state = linen_job(kind, 0)
    with checkpoint.manager(tmp_path) as steps:
        fresh = checkpoint.restore_job(steps, state, extra={"position": 0})
        assert fresh.step is None and fresh.job is state and fresh.extra == {"position": 0}
        for i in range(2):
            state = linen_step(state)
            checkpoint.save_job(steps, i, state, extra={"position": 10 * i})
    with checkpoint.manager(tmp_path) as steps:
        last, other, extra, _ = checkpoint.restore_job(steps, linen_job(kind, 1), extra={"position": 0})
    assert (last, extra, type(other)) == (1, {"position": 10}, kind)
    stepped = linen_step(state), linen_step(other)
    for assert_same, one, two in ((assert_moved, state, other), (assert_same_program, *stepped)):
        assert int(one.step) == int(two.step)
        for name in ("params", "opt_state", "batch_stats", "key"):
            assert_same(getattr(two, name), getattr(one, name))


class Module(nnx.Module):
    def __init__(self, rngs):
        self.dense, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.dropout, self.out = nnx.Dropout(0.5, rngs=rngs), nnx.LoRALinear(8, 1, lora_rank=2, rngs=rngs)

    def __call__(self, x):
        return self.out(self.dropout(self.norm(self.dense(x))))


def nnx_job(seed, wrt, noise_seed):
    model = Module(nnx.Rngs(seed))
    return model, jaxmp.nnx.Optimizer(model, make_tx(), wrt=wrt, policy=POLICY), nnx.Rngs(noise=noise_seed)


def nnx_step(model, optimizer, rngs):
    x = X + rngs.noise.normal(X.shape)
    loss_fn = lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2)  # noqa: E731
    _, grads = jaxmp.nnx.value_and_grad(loss_fn, wrt=optimizer.wrt)(model, x, opt_state=optimizer)
    optimizer.update(model, grads)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("wrt", [nnx.Param, nnx.LoRAParam], ids=["params", "adapters"])
def test_modules_go_on_in_three_lines(wrt, tmp_path):
    """Model, optimizer, statistics, the keys of dropout, a frozen base, and the keys of an object of its own."""
    job, step = nnx_job(0, wrt, 5), nnx.jit(nnx_step)
    with checkpoint.manager(tmp_path) as steps:
        assert checkpoint.restore_job(steps, job).step is None
        step(*job)
        checkpoint.save_job(steps, 0, job, extra={"position": 7})
    other = nnx_job(1, wrt, 6)
    found = checkpoint.restore_job(tmp_path, other, extra={"position": 0})
    assert found.step == 0 and found.job is other and found.extra == {"position": 7}
    for assert_same in (assert_moved, assert_same_program):
        for one, two in zip(job, other, strict=True):
            assert_same(*(jax.tree.leaves(nnx.as_pure(nnx.state(x))) for x in (two, one)))
        step(*job), step(*other)


def test_modules_that_hold_arrays_of_numpy_are_given_others_in_their_place(tmp_path):
    """The count of steps was written into the array that was there: into another job's, or it was an error."""

    def job(seed):
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(seed))
        return model, jaxmp.nnx.Optimizer(model, make_tx(), wrt=nnx.Param, policy=POLICY)

    old, (graphdef, state) = job(0), nnx.split(job(1))
    old[1].step.set_value(jnp.uint32(3))
    held = jax.tree.map(np.array, state)
    arrays = jax.tree.leaves(held)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save_job(steps, 0, old)
        found = checkpoint.restore_job(steps, nnx.merge(graphdef, held)).job
    assert_moved(arrays, [np.asarray(x) for x in jax.tree.leaves(state)])
    assert_moved(*(jax.tree.map(np.asarray, nnx.as_pure(nnx.state(x))) for x in (found, old)))


def test_what_is_no_job_and_what_is_not_in_the_checkpoint(tmp_path):
    state = linen_job(WithStats, 0)
    with checkpoint.manager(tmp_path) as steps:
        for job, got in ((state.params, "dict"), ((state.params, state.opt_state), "dict, StepState")):
            with pytest.raises(TypeError, match=rf"a job is a TrainState .* got {got}\. For params and a state"):
                checkpoint.save_job(steps, 0, job)
        with pytest.raises(ValueError, match="the name 'job' in extra is that of the job itself"):
            checkpoint.save_job(steps, 0, state, extra={"job": 3})
        with pytest.raises(ValueError, match="no complete checkpoint of step 4"):
            checkpoint.restore_job(steps, state, step=4)
        checkpoint.save_job(steps, 0, state.replace(batch_stats={}))
        with pytest.raises(ValueError, match="every leaf of extra=; job/batch_stats/norm/mean is missing"):
            checkpoint.restore_job(steps, state)
        found = checkpoint.restore_job(steps, state, partial="job/batch_stats/*")
        assert found.report.fresh == ("job/batch_stats/norm/mean", "job/batch_stats/norm/var")
        assert_moved(found.job.batch_stats, state.batch_stats)


def test_what_only_the_checkpoint_has_of_a_job_is_named(tmp_path):
    """The keys of a third object were dropped in silence, and the job went on with other ones."""

    def job(*others):
        model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
        tx = jaxmp.mixed_precision(optax.sgd(1e-2), "bf16")
        return model, jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy="bf16"), *others

    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save_job(steps, 0, job(nnx.Rngs(noise=1)), extra={"data": {"seen": 3, "epoch": 1}})
        with pytest.raises(
            ValueError, match="every leaf that was saved; job/2/noise/count is in the checkpoint and not"
        ):
            checkpoint.restore_job(steps, job())
        found = checkpoint.restore_job(steps, job(), partial="job/2/*")
        assert found.report == ((), ("job/2/noise/count", "job/2/noise/key"), ())
        assert found.extra == {"data": {"seen": 3, "epoch": 1}}
        with pytest.raises(ValueError, match="data/epoch is in the checkpoint and not in the job"):
            checkpoint.restore_job(steps, job(nnx.Rngs(noise=1)), extra={"data": {"seen": 0}})
        assert checkpoint.restore_job(steps, job(nnx.Rngs(noise=1)), extra={}).report == ((), (), ())


def test_trained_weights_do_not_get_lost_where_they_are_not_trained_any_more(tmp_path):
    """LoRA with its own `wrt=`: the base is no param of the optimizer there."""

    def job(layer, wrt):
        model = layer(nnx.Rngs(0))
        tx = jaxmp.mixed_precision(optax.sgd(1e-2), "bf16")
        return model, jaxmp.nnx.Optimizer(model, tx, wrt=wrt, policy="bf16")

    lora = lambda rngs: nnx.LoRALinear(4, 2, lora_rank=2, rngs=rngs)  # noqa: E731
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save_job(steps, 0, job(lambda rngs: nnx.Linear(4, 2, rngs=rngs), nnx.Param))
        for partial in ("*", "*lora*", ()):
            with pytest.raises(
                ValueError, match="weights of the checkpoint must come into the model; got .*kernel.*wrt="
            ):
                checkpoint.restore_job(steps, job(lora, nnx.LoRAParam), partial=partial)
        report = checkpoint.restore_job(steps, job(lora, nnx.Param), partial="*lora*").report
    assert report.left_over == () and all("lora" in path for path in report.fresh)


FP8_WEIGHTS = jaxmp.get_policy("fp8", fp8_weights=True)
KINDS = {"bf16": "bf16", "fp32": "fp32", "fp8": "fp8", "stored": FP8_WEIGHTS}


def lora_job(kind, seed):
    model = nnx.LoRALinear(16, 16, lora_rank=2, rngs=nnx.Rngs(seed))
    if kind in ("fp8", "stored"):
        jaxmp.nnx.to_fp8(model, filter=lambda path, layer: True)
    tx = jaxmp.mixed_precision(optax.sgd(1e-2), KINDS[kind])
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.LoRAParam, policy=KINDS[kind])
    jaxmp.nnx.cast_to_param(model, KINDS[kind])
    return model, optimizer


def weights(model):
    loaded = jaxmp.fp8.load_weights(nnx.as_pure(nnx.state(model, nnx.Param)), jnp.float32)
    return jax.tree.map(lambda x: x.astype(jnp.float32), loaded)


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("bf16", "fp32"),
        ("fp32", "bf16"),
        ("bf16", "stored"),
        ("fp8", "stored"),
        ("stored", "fp8"),
        ("stored", "stored"),
        ("stored", "bf16"),
    ],
)
def test_a_frozen_base_goes_on_in_another_precision(before, after, tmp_path):
    """It has no masters in the optimizer. Kernels in fp8 hold w * scale."""
    (model, optimizer), (new, other) = lora_job(before, 0), lora_job(after, 1)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save_job(steps, 0, (model, optimizer))
        if (before, after) == ("stored", "bf16"):
            with pytest.raises(
                ValueError, match="job/model/kernel, which this optimizer does not train, is float8.*fp8"
            ):
                checkpoint.restore_job(steps, (new, other))
            return
        dtypes = jax.tree.map(lambda x: x.dtype, nnx.as_pure(nnx.state(new, nnx.Param)))
        checkpoint.restore_job(steps, (new, other))
    assert jax.tree.map(lambda x: x.dtype, nnx.as_pure(nnx.state(new, nnx.Param))) == dtypes
    wanted = weights(model)
    if after == "stored" != before:
        scales = {"dot_general": {"fp8_rhs_e4m3_log2_scale": jnp.zeros(())}}
        stored = jaxmp.get_policy(FP8_WEIGHTS).cast_to_param({"kernel": wanted["kernel"], **scales})
        wanted["kernel"] = jaxmp.fp8.load_weights(stored, jnp.float32)["kernel"]
    if after == "bf16":
        wanted = jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), wanted)
    assert_exact(weights(new)["kernel"], wanted["kernel"])
    assert_exact(weights(new)["bias"], wanted["bias"])
    if (before, after) != ("fp8", "stored"):
        return

    @nnx.jit
    def step(model, optimizer, x):
        loss_fn = lambda model, x: jnp.mean(model(x) ** 2)  # noqa: E731
        _, grads = jaxmp.nnx.value_and_grad(loss_fn, wrt=nnx.LoRAParam)(model, x, opt_state=optimizer)
        optimizer.update(model, grads)

    for _ in range(2):
        step(new, other, jnp.ones((16, 16)))
    assert_moved(weights(new)["kernel"], wanted["kernel"])  # the scale of a kernel that nobody writes stays


def test_a_step_may_be_a_scalar_of_jax_and_extra_holds_numbers_only(tmp_path):
    state = linen_job(WithStats, 0)
    with checkpoint.manager(tmp_path) as steps:
        for leaf in (2**70, 1j, "text", np.array(["a"]), np.datetime64("2026-01-01")):
            with pytest.raises(ValueError, match="holds arrays and numbers; got .* at loader/position"):
                checkpoint.save_job(steps, 0, state, extra={"loader": {"position": leaf}})
        checkpoint.save_job(steps, jnp.int32(3), state, extra={"position": 2**40})
        with pytest.raises(ValueError, match="holds arrays and numbers; got str at position"):
            checkpoint.restore_job(steps, state, extra={"position": "0"})
        assert checkpoint.restore_job(steps, state, extra={"position": 0}).extra == {"position": 2**40}


@pytest.mark.parametrize("step", [3, jnp.int32(3)], ids=["number", "array"])
def test_a_train_state_that_orbax_saved_goes_on(step, tmp_path):
    """Of a job that never knew jaxmp; the error spoke of a tree `job`, and of extra=, which nobody passed."""
    plain = {"apply_fn": None, "params": {"w": jnp.ones(2)}, "batch_stats": {"mean": jnp.ones(3)}, "key": None}
    old = PlainWithStats.create(tx=optax.adam(1e-2), **plain).replace(step=step)
    with ocp.CheckpointManager(tmp_path) as steps:
        steps.save(7, args=ocp.args.StandardSave(old))
    fresh = {"params": {"w": jnp.zeros(2)}, "batch_stats": {"mean": jnp.zeros(3)}}
    new = WithStats.create(tx=jaxmp.mixed_precision(optax.adam(1e-2), "bf16"), policy="bf16", **plain | fresh)
    for extra in ({}, None):
        last, found, others, _ = checkpoint.restore_job(tmp_path, new, extra=extra)
        assert (last, others) == (7, {})
        assert_moved(found.step, jnp.int32(3) + jnp.zeros_like(new.step))
        assert_moved(found.batch_stats, old.batch_stats)
        assert_exact(found.params, {"w": jnp.ones(2, jnp.bfloat16)})
    assert checkpoint.restore_job(tmp_path, PlainWithStats.create(tx=optax.adam(1e-2), **plain)).job.step == 3


def test_statistics_without_a_field_in_the_job_are_an_error_and_a_path_has_the_step_of_the_count(
    tmp_path,
):
    """They were dropped in silence; and the step was None, which says that nothing was saved."""
    plain = {"apply_fn": None, "params": {"w": jnp.ones(2)}}
    old = PlainWithStats.create(tx=optax.sgd(0.1), **plain, batch_stats={"mean": jnp.ones(3)}, key=None).replace(step=5)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "tree", old)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
    with pytest.raises(
        ValueError, match=r"left over: the TrainState in the checkpoint has batch_stats, and the job has"
    ):
        checkpoint.restore_job(tmp_path / "tree", jaxmp.linen.TrainState.create(tx=tx, policy="bf16", **plain))
    new = WithStats.create(tx=tx, policy="bf16", **plain, batch_stats={"mean": jnp.zeros(3)}, key=None)
    assert checkpoint.restore_job(tmp_path / "tree", new).step == 5


def test_a_step_without_the_rest_of_a_job_is_named(tmp_path):
    state = linen_job(WithStats, 0)
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=state.params, opt_state=state.opt_state)
        with pytest.raises(ValueError, match=r"has opt_state, params, and not the batch_stats, key, step of the job"):
            checkpoint.restore_job(steps, state)
        found = checkpoint.restore_job(steps, state.replace(params=linen_job(WithStats, 1).params), partial="job/*")
    assert_moved(found.job.params, state.params)
    assert found.report.fresh == ("job/batch_stats/norm/mean", "job/batch_stats/norm/var", "job/key", "job/step")


def test_without_extra_all_of_it_comes_back_and_an_error_has_no_pages_behind_it(tmp_path):
    """A position of the data that nobody asked for was dropped in silence."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32")
    state = jaxmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones(2)}, tx=tx)
    extra = {"position": 32, "loader": {"order": jnp.arange(3), "epochs": [1, 2.5]}}
    with jaxmp.checkpoint.manager(tmp_path) as steps:
        jaxmp.checkpoint.save_job(steps, 0, state, extra=extra)
        found = jaxmp.checkpoint.restore_job(steps, state).extra
        assert_moved(found, extra)
        assert type(found["position"]) is int and type(found["loader"]["epochs"][1]) is float
        assert jaxmp.checkpoint.restore_job(steps, state, extra={}).extra == {}
    (tmp_path / "0" / "state" / "manifest.ocdbt").write_bytes(b"")
    with pytest.raises(ValueError, match="damaged, incomplete") as caught:
        jaxmp.checkpoint.restore_job(tmp_path, state)
    assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 60


def test_an_error_in_the_background_is_raised_by_the_next_call(tmp_path, monkeypatch):
    state, failing = linen_job(WithStats, 0), []
    sync = checkpoint_writer.sync

    def no_space(path):
        if failing:
            raise OSError(28, "No space left on device")
        sync(path)

    monkeypatch.setattr(checkpoint_writer, "sync", no_space)
    monkeypatch.setattr(checkpoint_writer, "_SAVES_END_LATE", True)  # else each save outside of `with` waits
    steps = checkpoint.manager(tmp_path)
    failing.append(True)
    checkpoint.save_job(steps, 0, state)  # it fails while it is written
    with pytest.raises(OSError, match="No space left"):
        checkpoint.save_job(steps, 1, state)
    failing.clear()
    checkpoint.save_job(steps, 2, state)
    assert checkpoint.restore_job(steps, state).step == 2
    failing.append(True)
    checkpoint.save_job(steps, 3, state)
    with pytest.raises(OSError, match="No space left"):
        checkpoint.restore_job(steps, state)
    checkpoint.save_job(steps, 4, state)
    with pytest.raises(OSError, match="No space left"):
        steps.close()
    failing.clear()
    assert [x.name for x in sorted(tmp_path.iterdir()) if x.name.isdigit()] == ["2"]
