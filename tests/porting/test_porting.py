"""The recipe of docs/how-to/job/from_mmcv.md beside the loop that it is ported from, written out in NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import ROOT, assert_close, assert_exact, assert_moved, python_blocks
from jaxmp._src.loss_scale import static
from regimes import AXIS, DEVICES, alike, guarded, mesh_of

F16, F32 = np.float16, np.float32


@functools.cache
def recipe():
    """What the code of docs/how-to/job/from_mmcv.md defines."""
    page = ROOT / "docs" / "how-to" / "job" / "from_mmcv.md"
    namespace = {}
    for block in python_blocks(page):
        exec(compile(block, str(page), "exec"), namespace)
    return namespace


PARAMS32 = {"w": np.linspace(-1.0, 1.3, 12, dtype=F32).reshape(4, 3), "norm": np.linspace(0.5, 1.5, 3, dtype=F32)[None]}
LEARNING_RATE, MOMENTUM, DECAY, MAX_NORM, STEPS = 0.02, 0.9, 1e-4, 3.0, 8


def targets(step):
    """What each device wants the params to be: [DEVICES, 5, 3], one row for each row of the params."""
    return np.random.default_rng(step).normal(size=(DEVICES, 5, 3)).astype(F32)


def loss_fn(params, batch):
    """Half the squared distance from the targets: one subtraction and one rounding make a gradient."""
    w, norm = params["w"].astype(jnp.float32), params["norm"]
    return 0.5 * (jnp.sum((w - batch[0, :4]) ** 2) + jnp.sum((norm - batch[0, 4:]) ** 2))


def mmcv_loop(scale):
    """mmcv's Fp16OptimizerHook with a static scale, and torch's SGD: params, float32 copies, norm in each step."""
    copies = {name: x.copy() for name, x in PARAMS32.items()}
    model = {"w": copies["w"].astype(F16), "norm": copies["norm"].copy()}
    momentum = None
    for i in range(STEPS):
        target = {"w": targets(i)[:, :4], "norm": targets(i)[:, 4:]}
        # one gradient for each device, in the dtype of the param; and their mean, in float32
        own = {
            n: ((p.astype(F32)[None] - target[n]) * F32(scale)).astype(p.dtype).astype(F32) for n, p in model.items()
        }
        grads = {n: g.sum(axis=0) / F32(DEVICES) for n, g in own.items()}
        grads = {n: g / F32(scale) for n, g in grads.items()}
        norm = np.sqrt(sum(np.sum(g.astype(np.float64) ** 2) for g in grads.values()))
        grads = {n: g * F32(min(1.0, MAX_NORM / (norm + 1e-6))) for n, g in grads.items()}
        grads = {n: g + F32(DECAY) * copies[n] for n, g in grads.items()}
        momentum = grads if momentum is None else {n: F32(MOMENTUM) * momentum[n] + g for n, g in grads.items()}
        copies = {n: copies[n] - F32(LEARNING_RATE) * m for n, m in momentum.items()}
        model = {n: copies[n].astype(p.dtype) for n, p in model.items()}
        yield model, copies, norm


def start_mmcv(loss_scale):
    parts = recipe()
    tx = parts["make_tx"](loss_scale=loss_scale, max_norm=MAX_NORM, learning_rate=LEARNING_RATE)
    params32 = jax.tree.map(jnp.asarray, PARAMS32)
    step = parts["make_step"](loss_fn, tx, mesh_of())
    return step, parts["policy"].cast_to_param(params32), tx.init(params32)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("scale", [512.0, 1000.0], ids=["reciprocal-512", "dividing-1000"])
def test_mmcvs_hook(scale):
    """On four devices, for a scale of which the reciprocal is exact, and for one that has to divide."""
    dividing = recipe()["DividingScale"]
    step, params, opt_state = start_mmcv(scale if scale == 512.0 else dividing(jnp.float32(scale)))
    clipped = []
    for i, (model, copies, norm) in enumerate(mmcv_loop(scale)):
        params, opt_state, _ = step(params, opt_state, targets(i))
        masters = jaxmp.get_master_params(opt_state, params)
        assert_close(masters, copies, rtol=1e-6, atol=1e-6)
        assert_exact(params, {"w": masters["w"].astype(F16), "norm": masters["norm"]})
        assert_close(params, model, rtol=2.0**-10, atol=1e-6)  # a copy next to a midpoint may round the other way
        assert_close(jaxmp.get_metrics(opt_state)["grad_norm"], F32(norm), rtol=1e-6)
        clipped.append(norm > MAX_NORM)
    assert any(clipped) and not all(clipped)
    moments = optax.tree.get(opt_state, "trace")
    assert {x.dtype.name for x in jax.tree.leaves(moments)} == {"float32"}


@pytest.mark.thorough(0)
def test_dividing_is_not_multiplying_by_the_reciprocal():
    """Also where XLA sees that it is one number: over 1000, most float16 gradients end in another bit."""
    dividing = recipe()["DividingScale"](jnp.float32(1000.0))
    scaled = np.linspace(1.0, 2.0, 100, dtype=F16)
    unscaled = jax.jit(lambda s, g: s.unscale(g))(dividing, {"g": scaled})
    assert_exact(unscaled, {"g": scaled.astype(F32) / F32(1000.0)})
    other = static.StaticLossScale(1000.0).unscale({"g": jnp.asarray(scaled)})["g"]
    assert not np.array_equal(other, scaled.astype(F32) / F32(1000.0))


@pytest.mark.thorough(0)
def test_an_inf_under_a_static_scale_is_skipped():
    """mmcv does not look under a static scale, and holds NaN for ever after; here all devices stay as they were."""
    step, params, opt_state = start_mmcv(512.0)
    params, opt_state, _ = step(params, opt_state, targets(0))
    bad = targets(1)
    bad[2, 0, 0] = np.inf  # on one device
    after_params, after_state, _ = step(params, opt_state, bad)
    assert_moved((after_params, guarded(after_state)), (params, guarded(opt_state)))
    assert_exact((jaxmp.get_loss_scale(after_state), jaxmp.get_metrics(after_state)["skipped_steps"]), (512.0, 1))
    copies = [[np.asarray(s.data) for s in x.addressable_shards] for x in jax.tree.leaves((after_params, after_state))]
    assert all(len(c) == DEVICES and alike(c) for c in copies)
    assert AXIS == "data"  # the recipe's name for it
