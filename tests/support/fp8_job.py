"""A job for `regimes.py` that trains in fp8, and whose sums are exact in every order.

All numbers are small multiples of powers of two, so a sum does not depend on how devices and microbatches cut it: every
regime must come to the same bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
import regimes
from fp8_model import fp8_state, matmul, scale_leaves
from regimes import Job, guarded

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
def make_job(name: str, accumulate: int = 1) -> Job:
    policy_name, dtype = POLICIES[name]
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

    def values(state: Any) -> dict[str, Any]:
        params, opt_state = state
        masters = jaxmp.get_master_params(opt_state, params)
        return {"params": params, "masters": masters, "fp8": fp8_state(opt_state)}

    state = (policy.cast_to_param(params32), tx.init(params32))
    return Job(state, step, lambda s: s[1], lambda s: (s[0], guarded(s[1])), values)


@functools.cache
def devices_of(regime_name: str, name: str, accumulate: int = 1) -> list[list[Any]]:
    """`devices[step][device]`: what each device held in a run over `make_batches()`, from before the first step on."""
    return regimes.run_job(regimes.regime_of(regime_name), make_job(name, accumulate), make_batches()).devices
