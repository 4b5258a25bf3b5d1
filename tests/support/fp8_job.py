"""Jobs for `regimes.py` that train in fp8: one whose sums are exact in every order, one in linen, one in nnx.

In the exact job all numbers are small multiples of powers of two, so a sum does not depend on how devices and
microbatches cut it: every regime must come to the same bits.
"""

import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmp
import regimes
from fp8_model import fp8_state, matmul, scale_leaves
from regimes import Job, guarded, squared_error

ROWS, WIDTH = 128, 16  # 16 rows on each of 4 devices in each of 2 microbatches: the least that an fp8 GEMM takes
RECIPE = jaxmp.fp8.DelayedScaling(amax_history_len=3)
# name -> (policy, the dtype whose decisions regimes.EXPECTED lists)
POLICIES = {"fp8": ("fp8", "bf16"), "fp16+fp8": ("fp16", "fp16")}


def make_batches() -> list[dict[str, Any]]:
    """Six batches of small whole numbers, growing, two of which hold inf or NaN in one device's rows."""
    batches = []
    for i in range(regimes.STEPS):
        rng = np.random.default_rng(i)
        x = rng.integers(-4, 5, (ROWS, WIDTH)).astype(np.float32) * 2.0 ** (i // 2)
        if i in regimes.BAD:
            x[40, 3] = regimes.BAD[i]  # the second of four devices
        batches.append({"x": x, "y": rng.choice([-2.0, -1.0, 1.0, 2.0], (ROWS, WIDTH)).astype(np.float32)})
    return batches


@functools.cache
def make_job(framework: str, name: str, axis_name: str | None = None, accumulate: int = 1) -> Job:
    policy, dtype = POLICIES[name]
    return {"exact": _exact_job, "linen": _linen_job, "nnx": _nnx_job}[framework](policy, dtype, accumulate)


def _values(params: Any, opt_state: Any) -> dict[str, Any]:
    return {
        "params": params,
        "masters": jaxmp.get_master_params(opt_state, params),
        "fp8": fp8_state(opt_state),
    }


def _exact_job(policy_name: str, dtype: str, accumulate: int) -> Job:
    policy = jaxmp.get_policy(policy_name)
    rng = np.random.default_rng(3)
    params32 = {
        name: {"w": np.asarray(rng.integers(-8, 9, (WIDTH, WIDTH)) / 8, np.float32)} | scale_leaves()
        for name in ("a", "b")
    }
    params32 = jax.tree.map(jnp.asarray, params32)
    options = {"loss_scale": regimes.loss_scale_of(dtype), "recipe": RECIPE, "before": jaxmp.reduce_gradients()}
    tx = jaxmp.mixed_precision(optax.sgd(1 / 4), policy, **options)

    def loss_fn(params: Any, batch: Any) -> Any:
        h = matmul(params["a"], batch["x"].astype(policy.compute_dtype), RECIPE)
        return jnp.mean(matmul(params["b"], h, RECIPE).astype(jnp.float32) * batch["y"])

    def step(state: Any, batch: Any, mean: Any) -> Any:
        del mean  # `before` reduces
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(loss_fn, accumulate=accumulate)(params, batch, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    state = (policy.cast_to_param(params32), tx.init(params32))
    return Job(state, step, lambda s: s[1], lambda s: (s[0], guarded(s[1])), lambda s: _values(*s))


class LinenNet(nn.Module):
    dtype: Any

    @nn.compact
    def __call__(self, x: Any) -> Any:
        for _ in range(2):
            x = nn.tanh(nn.Dense(WIDTH, dtype=self.dtype)(x))
        return nn.Dense(WIDTH, dtype=self.dtype)(x)


def _linen_job(policy_name: str, dtype: str, accumulate: int) -> Job:
    policy = jaxmp.get_policy(policy_name)
    model = LinenNet(policy.compute_dtype)

    @jax.jit
    def init(key: Any) -> Any:
        with jaxmp.fp8.autocast(RECIPE):
            return model.init(key, jnp.ones((2, WIDTH)))["params"]

    params32 = init(jax.random.key(0))
    tx = jaxmp.mixed_precision(regimes.optimizer(), policy, loss_scale=regimes.loss_scale_of(dtype), recipe=RECIPE)
    state = jaxmp.linen.TrainState.create(apply_fn=model.apply, params=params32, tx=tx, policy=policy)

    def loss_fn(params: Any, batch: Any) -> Any:
        with jaxmp.fp8.autocast(RECIPE):
            return squared_error(model.apply({"params": params}, batch["x"] / 4), batch["y"])

    def step(state: Any, batch: Any, mean: Any) -> Any:
        compute = jaxmp.value_and_grad(loss_fn, accumulate=accumulate)
        loss, grads = compute(state.params, batch, opt_state=state.opt_state)
        return state.apply_gradients(grads=mean(grads)), loss  # the mean of the whole tree, as all do

    return Job(
        state,
        step,
        lambda s: s.opt_state,
        lambda s: (s.params, s.step, guarded(s.opt_state)),
        lambda s: _values(s.params, s.opt_state),
    )


class NnxNet(nnx.Module):
    def __init__(self, dtype: Any, rngs: nnx.Rngs):
        self.layers = nnx.List([nnx.Linear(WIDTH, WIDTH, dtype=dtype, rngs=rngs) for _ in range(3)])

    def __call__(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = jnp.tanh(layer(x))
        return self.layers[-1](x)


def _nnx_job(policy_name: str, dtype: str, accumulate: int) -> Job:
    policy = jaxmp.get_policy(policy_name)
    model = NnxNet(policy.compute_dtype, nnx.Rngs(0))
    jaxmp.nnx.to_fp8(model, RECIPE)
    tx = jaxmp.mixed_precision(regimes.optimizer(), policy, loss_scale=regimes.loss_scale_of(dtype), recipe=RECIPE)
    opt = nnx.Optimizer(model, tx, wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, policy)
    graphdef, initial = nnx.split((model, opt))

    def loss_fn(model: NnxNet, batch: Any) -> Any:
        return squared_error(model(batch["x"] / 4), batch["y"])

    def step(state: Any, batch: Any, mean: Any) -> Any:
        model, opt = nnx.merge(graphdef, state)
        compute = jaxmp.nnx.value_and_grad(loss_fn, accumulate=accumulate)
        loss, grads = compute(model, batch, opt_state=opt.opt_state)
        opt.update(model, mean(grads))
        return nnx.state((model, opt)), loss

    def opt_state(state: Any) -> Any:
        return nnx.as_pure(nnx.merge(graphdef, state)[1].opt_state)

    def params(state: Any) -> Any:
        return nnx.as_pure(nnx.state(nnx.merge(graphdef, state)[0], nnx.Param))

    return Job(
        initial,
        step,
        opt_state,
        lambda s: (params(s), guarded(opt_state(s))),
        lambda s: _values(params(s), opt_state(s)),
    )


@functools.cache
def devices_of(regime_name: str, framework: str, name: str, accumulate: int = 1) -> list[list[Any]]:
    """`devices[step][device]`: what each device held in a run over `make_batches()`, from before the first step on."""
    regime = regimes.SINGLE if regime_name == "single" else regimes.REGIMES[regime_name]
    job = make_job(framework, name, regime.axis_name, accumulate)
    compiled = regime.compile(job.step)
    state = regime.place(job.state)
    devices = [regime.copies(state)]
    for batch in make_batches():
        state, _ = jax.block_until_ready(compiled(state, jax.block_until_ready(regime.shard(batch))))
        devices.append(regime.copies(state))
    return devices
