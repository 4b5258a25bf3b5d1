"""The three small jobs whose checkpoints are kept beside this file, and the script that wrote them.

    PYTHONPATH=$PWD python tests/checkpoint/kept/jobs.py FOLDER

The checkpoints in `before_formats/` were written before the record had a format. No folder is ever written again: a
later format gets a folder of its own, written by the code that has it.
"""

import hashlib
import pathlib
import shutil
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxmp
from jaxmp import checkpoint
from jaxmp._src.step.state import Fp8State

SCALES = ("fp8_lhs_e4m3_log2_scale", "fp8_rhs_e4m3_log2_scale", "fp8_grad_e5m2_log2_scale")


def _numbers(*shape):
    """The same numbers on every machine and for every version of NumPy."""
    return np.linspace(-1.0, 1.0, int(np.prod(shape)), dtype=np.float32).reshape(shape)


def plain():
    """(tx, policy, params in float32) of dicts and lists, with an average and a dynamic loss scale."""
    policy = jaxmp.get_policy("fp16", keep_fp32=("norm",))
    inner = optax.chain(jaxmp.clip_by_global_norm(1.0), optax.adam(1e-2), jaxmp.ema_params(0.9))
    params = {"blocks": [{"kernel": _numbers(3, 4)}, {"kernel": _numbers(3, 4) / 3}], "norm": _numbers(4) * 0.1}
    return jaxmp.mixed_precision(inner, policy, loss_scale=jaxmp.DynamicLossScale(16.0)), policy, params


def fp8():
    """(tx, policy, params in float32) of two fp8 layers, with split masters and moments in 8 bits."""
    policy = jaxmp.get_policy("bf16")
    layer = {"kernel": _numbers(16, 256), **{name: np.float32(i) for i, name in enumerate(SCALES)}}
    params = {"up": layer, "down": layer | {"kernel": _numbers(6, 5)}}
    params = jaxmp.get_policy("bf16", keep_fp32=("*scale",)).cast_to_param(params)
    inner = jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8)
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=3)
    return jaxmp.mixed_precision(inner, policy, recipe=recipe, remainder_bits=16), policy, params


def trained(tx, policy, params):
    """(params, opt_state) after two steps whose gradients are the params."""
    params = jax.tree.map(jnp.asarray, params)
    held, opt_state = policy.cast_to_param(params), tx.init(params)
    jaxmp.get_loss_scale(())  # the gradients are made by hand
    for _ in range(2):
        grads = jax.tree.map(jnp.copy, held)
        held, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, held)
    return held, opt_state


def modules():
    """(model, optimizer, rngs) of nnx, with BatchNorm and Dropout, before a step."""

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)])
            self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            return self.layers[1](self.dropout(self.norm(self.layers[0](x))))

    model = Model(nnx.Rngs(0))
    nnx.update(model, jax.tree.map(lambda x: jnp.asarray(_numbers(*x.shape)), nnx.state(model, nnx.Param)))
    tx = jaxmp.mixed_precision(optax.adamw(1e-2), "bf16")
    return model, jaxmp.nnx.Optimizer(model, tx, policy="bf16"), nnx.Rngs(1)


def trained_modules():
    """The modules after a step."""
    model, optimizer, rngs = modules()
    loss = lambda model, x: jnp.mean(model(x).astype(jnp.float32) ** 2)  # noqa: E731
    _, grads = jaxmp.nnx.value_and_grad(loss)(model, jnp.asarray(_numbers(5, 4)), opt_state=optimizer)
    optimizer.update(model, grads)
    rngs.default()
    return model, optimizer, rngs


def values_of_modules(job):
    """The arrays of modules, as a tree."""
    model, optimizer, rngs = job
    return [nnx.as_pure(x) for x in (nnx.state(model), optimizer.opt_state, nnx.state(rngs))]


LATER = ("largest_gradient",)  # counts of a step that the kept checkpoints do not have,
LATER_OF_FP8 = ("spoiled_tensors",)  # and of fp8


def bits(tree):
    """A digest of the bytes of each leaf of a tree, in its order, as text; without the counts that came later."""

    def without(x):
        if isinstance(x, Fp8State):
            return x._replace(**dict.fromkeys(LATER_OF_FP8))
        if isinstance(x, jaxmp._src.step.state.StepState):
            return x._replace(**dict.fromkeys(LATER), fp8_scales=without(x.fp8_scales))
        return x

    tree = jax.tree.map(without, tree, is_leaf=lambda x: isinstance(x, jaxmp._src.step.state.StepState))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    leaves = [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(tree)]
    return "\n".join(hashlib.sha256(x.tobytes()).hexdigest() for x in leaves)


def _write(folder):
    for name, job in (("plain", plain()), ("fp8", fp8())):
        params, opt_state = trained(*job)
        extra = {"position": 7, "mean": jnp.arange(3.0), "key": jax.random.key(3)}
        with checkpoint.manager(folder / name) as steps:
            checkpoint.save(steps, 2, params=params, opt_state=opt_state, extra=extra, policy=job[1])
        (folder / name / "bits").write_text(bits((params, opt_state)))
    modules = trained_modules()
    with checkpoint.manager(folder / "nnx") as steps:
        checkpoint.save_job(steps, 2, modules, extra={"position": 7})
    (folder / "nnx" / "bits").write_text(bits(values_of_modules(modules)))
    for name in ("plain", "fp8", "nnx"):
        (folder / name / ".writer").unlink()
        shutil.make_archive(str(folder / name), "zip", folder / name)
        shutil.rmtree(folder / name)


if __name__ == "__main__":
    _write(pathlib.Path(sys.argv[1]).absolute())
