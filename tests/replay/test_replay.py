"""Captured steps, replayed: faults of the numbers come back, those of the machine do not, and each has its verdict."""

import json
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_close, assert_moved, assert_within_ulps
from jaxmp import __main__ as command
from jaxmp._src.base import named_functions
from jaxmp._src.replay import replay as replay_lib
from jaxmp.monitor import capture, load_capture, replay

HALF = jnp.float16
SCALE = 2.0**16
state = {"rng": np.random.default_rng(0)}


def linear_loss(params, x, *, factor=1.0):
    return jnp.mean((x @ params["w"]).astype(jnp.float32)) * factor


def noisy_loss(params, x):
    noise = jax.pure_callback(lambda: np.float32(state["rng"].normal()), jax.ShapeDtypeStruct((), jnp.float32))
    return linear_loss(params, x) * noise


def params_and_batch(weight=1.0, x=1.0):
    return {"w": jnp.full((4, 2), weight, HALF)}, jnp.full((8, 4), x, HALF)


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(1, dtype=HALF, name="head")(nn.Dense(8, dtype=HALF, name="body")(x)).astype(jnp.float32)


def model_loss(params, x):
    return jnp.mean(Model().apply({"params": params}, x))


# Verdicts


def test_a_step_that_the_scale_skipped_is_finite_at_the_scale_that_is_found(tmp_path):
    """As in a training loop: what is captured after the step is what it started from."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=jaxmp.DynamicLossScale(SCALE, hysteresis=1))
    params32 = jax.tree.map(lambda x: x.astype(jnp.float32), params_and_batch()[0])
    x = jnp.full((8, 4), 100.0, HALF)

    @jax.jit
    def step(params, opt_state, x):
        loss, grads = jaxmp.value_and_grad(linear_loss)(params, x, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    opt_state, params = tx.init(params32), jaxmp.get_policy("fp16").cast_to_param(params32)
    before, scale = params, float(jaxmp.get_loss_scale(opt_state))
    params, opt_state, loss = step(params, opt_state, x)
    metrics = jaxmp.get_metrics(opt_state)
    assert metrics["skipped"] and metrics["loss_scale"] == scale / 2
    assert_moved(params, before)
    path = capture(tmp_path, linear_loss, params, x, loss_scale=scale, observed={"loss": loss, **metrics})
    found = replay(path)
    assert found.verdict == "loss scale" and not found.clean
    assert [(run.loss, run.bad.path, run.finite) for run in found.runs] == [(400.0, "w", False)] * 3
    assert len({run.digest for run in found.runs}) == 1

    def is_finite(scale):
        state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=scale).init(params32)
        return bool(jaxmp.all_finite(jaxmp.value_and_grad(linear_loss)(params, x, opt_state=state)[1]))

    assert is_finite(found.finite_scale) and not is_finite(2 * found.finite_scale)
    assert found.bad_op.backward and found.bad_op.float32_amax > 65504
    assert found.float32 is True
    assert "65536 is too high for this step, which is finite at" in str(found)


def test_a_gradient_that_was_flipped_once_is_transient(tmp_path):
    """The poisoned step is skipped, so the params that are left are those of the step."""
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=4.0)
    params, x = params_and_batch()
    opt_state = tx.init(params)
    loss, grads = jaxmp.value_and_grad(linear_loss)(params, x, opt_state=opt_state)
    bits = np.asarray(grads["w"]).view(np.uint16).copy()
    bits[1, 1] |= 0x7C00  # all bits of the exponent
    after, opt_state = jaxmp.apply_gradients(tx, {"w": jnp.asarray(bits.view(np.float16))}, opt_state, params)
    metrics = jaxmp.get_metrics(opt_state)
    assert metrics["skipped"]
    found = replay(capture(tmp_path, linear_loss, after, x, loss_scale=4.0, observed={"loss": loss, **metrics}))
    assert (found.verdict, found.clean, found.bad_op) == ("transient", True, None)
    assert "the step was skipped, and 3 replays are finite, with equal bits" in str(found)


def test_a_layer_that_overflows_is_deterministic_and_named(tmp_path):
    x = jnp.ones((2, 4), HALF)
    params = jax.jit(Model().init)(jax.random.key(0), x)["params"]
    params["body"]["kernel"] = jnp.full((4, 8), 3e4)
    found = replay(capture(tmp_path, model_loss, params, x, loss_scale=SCALE))
    assert found.verdict == "deterministic"
    assert (found.bad_op.module, found.bad_op.primitive, found.bad_op.backward) == ("body", "dot_general", False)
    assert found.finite_scale is None
    assert "3 replays are not finite at any loss scale down to 1, at dot_general in body (forward)" in str(found)
    assert "note: modules with their own dtype=, and autocast, compute in that dtype even" in str(found)
    assert found.float32 is False  # as the layers say float16


def test_what_changes_from_replay_to_replay_is_not_reproducible(tmp_path):
    found = replay(capture(tmp_path, noisy_loss, *params_and_batch(), loss_scale=1.0), times=2)
    assert found.verdict == "not reproducible" and not found.clean
    assert len({run.digest for run in found.runs}) == 2
    assert "2 replays of the same inputs differ." in str(found)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("where", "path"), [("batch", "1[2, 3]"), ("params", "0/w[3, 1]")])
def test_arguments_that_are_not_finite_are_named(tmp_path, where, path):
    params, x = params_and_batch()
    if where == "batch":
        x = x.at[2, 3].set(jnp.nan)
    else:
        params = {"w": params["w"].at[3, 1].set(jnp.nan)}
    found = replay(capture(tmp_path, linear_loss, params, x, loss_scale=SCALE))
    assert found.verdict == "data"
    assert f"data: argument {path} is nan; 1 of" in str(found)
    assert ("These are the params: an earlier step" in str(found)) == (where == "params")


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("observed", "verdict", "words"),
    [
        ({"loss": 4.0, "skipped": True, "grads_finite": True}, "reproduced", "and the loss is 4 again, as observed"),
        ({"loss": 4.1}, "reproduced", "and the loss is 4 again, as observed"),
        ({"loss": 4e3}, "transient", "had a loss of 4000, and 3 replays are finite, with equal bits, with a loss of 4"),
        ({"loss": float("nan")}, "transient", "the step was not finite, and 3 replays are finite, with equal bits"),
        ({"loss": 4.0, "grads_finite": False}, "transient", "the step was not finite, and 3 replays are finite"),
        ({"loss": 4.0, "skipped": 1.0}, "transient", "(If skip_if skipped it, and not an overflow, pass"),
        ({}, "transient", "nothing was observed of the step itself"),
    ],
    ids=["skip_if", "same loss", "spike", "nan", "gradients", "skipped", "nothing"],
)
def test_finite_replays_are_held_against_what_was_observed(tmp_path, observed, verdict, words):
    found = replay(capture(tmp_path, linear_loss, *params_and_batch(), loss_scale=1.0, observed=observed))
    assert (found.verdict, found.clean) == (verdict, verdict == "transient")
    assert words in str(found)


def test_a_program_that_is_finite_one_by_one_is_told_so(tmp_path, monkeypatch):
    monkeypatch.setattr(replay_lib.first_bad_op, "walk", lambda *args: None)
    found = replay(capture(tmp_path, linear_loss, *params_and_batch(x=jnp.inf), loss_scale=1.0))
    assert (found.verdict, found.bad_op) == ("deterministic", None)
    assert "operation by operation all is finite: the compiled program computes other numbers" in str(found)


# The same step


@pytest.mark.thorough(1)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_gradients_are_those_of_the_step(tmp_path, accumulate):
    """What value_and_grad gives for the same arguments, keywords and options."""
    params, x = params_and_batch(weight=0.3)
    x = jax.random.normal(jax.random.key(0), x.shape, HALF)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp16", loss_scale=64.0)

    def with_aux(params, x, flag, *, factor):
        assert flag == "on"
        return linear_loss(params, x, factor=factor), x

    options = {"has_aux": True, "accumulate": accumulate, "accumulate_argnums": 1}
    differentiated = jaxmp.value_and_grad(with_aux, **options)
    expected = jax.jit(lambda p, x, s: differentiated(p, x, "on", opt_state=s, factor=2.0))(params, x, tx.init(params))
    path = capture(tmp_path, with_aux, params, x, "on", factor=2.0, loss_scale=64.0, **options)
    step = replay_lib._Step(load_capture(path), with_aux)
    loss, grads = jax.tree.unflatten(step.treedef, step.compiled(jnp.float32(64), *step.arrays))
    assert_within_ulps(grads, expected[1], 2)
    assert_close(loss, expected[0][0], rtol=2.0**-10, atol=2.0**-10)  # a mean of float16, of which one may be rounded


class NnxModel(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(4, 8, rngs=rngs, dtype=HALF)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(8, 1, rngs=rngs, dtype=HALF)

    def __call__(self, x):
        return self.head(self.drop(self.norm(self.dense(x)))).astype(jnp.float32)


def nnx_loss(model, x):
    return jnp.mean(model(x))


@pytest.mark.thorough(0)
def test_an_nnx_module_with_state_and_keys(tmp_path):
    model = NnxModel(nnx.Rngs(0))
    jaxmp.nnx.cast_to_param(model, "fp16")
    model.head.kernel[...] = jnp.full((8, 1), 6e4, HALF)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), HALF)
    before = nnx.to_pure_dict(nnx.state(model))
    path = capture(tmp_path, nnx_loss, model, x, loss_scale=SCALE)
    found = replay(path)
    assert found.verdict == "deterministic" and len({run.digest for run in found.runs}) == 1
    assert found.bad_op.where() == "dot_general in head (forward)"
    assert_moved(nnx.to_pure_dict(nnx.state(model)), before)


def test_a_step_under_a_policy_is_replayed_under_it(tmp_path):
    """In float32 the product is finite, in float16 it is not: a replay without the policy would find nothing."""
    params = {"w": np.full((8, 8), 200.0, np.float32)}
    x = np.full((8, 8), 200.0, np.float32)
    for policy, finite in ((None, True), ("16-mixed", False), (jaxmp.get_policy("bf16-mixed"), True)):
        path = capture(tmp_path / str(policy), product_loss, params, x, loss_scale=1.0, policy=policy)
        found = replay(path, product_loss, times=1)
        assert found.runs[0].finite == finite, policy
        assert finite or found.float32


def product_loss(params, x):
    return jnp.mean(jnp.log(jnp.abs(x @ params["w"])))


def test_without_a_name_the_function_is_passed(tmp_path):
    path = capture(tmp_path, lambda p, x: linear_loss(p, x), *params_and_batch(), loss_scale=1.0)
    with pytest.raises(ValueError, match="a replay needs the loss function: '' cannot be imported. Name a function"):
        replay(path)
    assert replay(load_capture(path), linear_loss, times=1).clean


def test_times_is_a_number_of_replays(tmp_path):
    with pytest.raises(ValueError, match="times must be a number of replays >= 1; got 0"):
        replay(tmp_path, linear_loss, times=0)


def test_another_machine_is_noted(tmp_path):
    path = capture(tmp_path, linear_loss, *params_and_batch(), loss_scale=1.0)
    meta = json.loads((path / "capture.json").read_text())
    meta["about"]["devices"] = "8 x NVIDIA H100"
    (path / "capture.json").write_text(json.dumps(meta))
    found = replay(path)
    assert "note: devices was '8 x NVIDIA H100' in the run, and is '8 x cpu' here" in str(found)
    assert len(found.notes) == 1


# python -m jaxmp replay

SCRIPT = """
import jax.numpy as jnp
from typing import NamedTuple

class Batch(NamedTuple):
    x: object

def loss_fn(params, batch):
    return jnp.mean(batch.x * params).astype(jnp.float32)

def arguments():
    return jnp.zeros(2, jnp.float16), Batch(jnp.zeros(2, jnp.float16))

def broken(params, batch):
    return params["no such param"]

if __name__ == "__main__":
    raise SystemExit("it was run as a script")
"""


@pytest.fixture
def script(tmp_path):
    """A training script; (its path, a capture of a step that it would take)."""
    path = tmp_path / "train_job.py"
    path.write_text(SCRIPT)
    named_functions.function_of(f"{path}:loss_fn")
    module = sys.modules[path.stem]
    yield (
        path,
        lambda x: capture(
            tmp_path / "captures",
            module.loss_fn,
            jnp.ones(2, HALF),
            module.Batch(jnp.full(2, x, HALF)),
            loss_scale=1.0,
            observed={"skipped": True},
        ),
    )
    del sys.modules["train_job"]
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("x", "status", "verdict"), [(2.0, 0, "transient"), (np.nan, 1, "data")])
def test_the_exit_status_is_the_verdict(script, capsys, x, status, verdict):
    path, make = script
    folder = make(x)
    for given in ([str(folder)], [str(folder.parent), "train_job:loss_fn"], [str(folder), f"{path}:loss_fn"]):
        assert command.main(["replay", *given, "--times", "2"]) == status
        out = capsys.readouterr().out
        assert f"\n{verdict}: " in out
        assert "replayed 2 times, compiled: the same bits each time\n" in out
        assert out.startswith(f"{folder}: loss scale 1\nobserved: skipped 1\n")
    assert command.main(["replay", str(folder), "--like", f"{path}:arguments"]) == status


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no/such"], "no/such must be a capture, or a directory of captures; there is none"),
        (["FOLDER", "no_such_module:loss_fn"], "'no_such_module:loss_fn' is not there: No module named"),
        (["FOLDER", "train_job:no_loss"], "'train_job:no_loss' is not there: module 'train_job' has no attribute"),
        (["FOLDER", "no/such.py:loss_fn"], "'no/such.py:loss_fn' is not there"),
        (["FOLDER", "loss_fn"], "'loss_fn' cannot be imported. Name a function as module:function or file.py:function"),
        (["FOLDER", "train_job:broken"], "no such param"),
        (["MAIN"], "a replay needs the loss function: '__main__:loss_fn' cannot be imported. Name a function as"),
        (["FOLDER", "--times", "0"], "times must be a number of replays >= 1; got 0"),
        ([], "the following arguments are required: capture"),
    ],
    ids=["folder", "module", "function", "file", "no module", "raises", "main", "times", "nothing"],
)
def test_what_cannot_be_run_has_status_2(script, capsys, arguments, message):
    folder = script[1](1.0)
    if arguments == ["MAIN"]:  # captured by a script
        meta = folder / "capture.json"
        meta.write_text(meta.read_text().replace("train_job:", "__main__:"))
    with pytest.raises(SystemExit) as stopped:
        command.main(["replay", *(str(folder) if a in ("FOLDER", "MAIN") else a for a in arguments)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_that_fails_when_imported_has_status_2(tmp_path, capsys):
    path = tmp_path / "fails.py"
    path.write_text("raise RuntimeError('it trains at once')")
    with pytest.raises(SystemExit) as stopped:
        command.main(["replay", str(tmp_path), f"{path}:loss_fn"])
    assert stopped.value.code == 2 and "it trains at once" in capsys.readouterr().err
    sys.path[:] = [p for p in sys.path if p != str(tmp_path)]
