"""Models that are cut over devices: data, FSDP and tensor parallelism on one mesh.

Every shard takes the same decision, norms and zero counts are those of the whole model, tied weights count once.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact
from jaxmp import fsdp

VOCABULARY, WIDTH, HIDDEN, LENGTH, BATCH = 16, 8, 32, 4, 16
POLICIES = {name: jaxmp.get_policy(name, keep_fp32=("*norm*",)) for name in ("fp16", "fp32")}
# float16 rounds the gradients of each device's rows apart; in float32 only sums come in another order
TOLERANCE = {"fp16": 3e-4, "fp32": 2e-6}


def draw(*shape, seed):
    return np.float32(np.random.default_rng(seed).normal(size=shape) / shape[0] ** 0.5)


PARAMS = {
    "embedding": draw(VOCABULARY, WIDTH, seed=1),  # tied: it is the last matrix, too
    "norm": np.ones((1, 1, WIDTH), np.float32),
    "up": draw(WIDTH, HIDDEN, seed=2),
    "down": draw(HIDDEN, WIDTH, seed=3),
}
TENSOR = {"embedding": P(), "norm": P(), "up": P(None, "tensor"), "down": P("tensor", None)}
MESHES = {"2x2x2": (2, 2, 2), "2x1x4": (2, 1, 4)}
AXES = ("data", "fsdp", "tensor")
ROWS = P(("data", "fsdp"))


def loss_of(params, batch, over_tensor=lambda x: x):
    """`params` as this shard of the tensor axis has them; `over_tensor` sums what each has a part of."""
    x = params["embedding"][batch["x"]]
    h = (x.astype(jnp.float32) * params["norm"]).astype(x.dtype)
    x = x + over_tensor(jnp.tanh(h @ params["up"]) @ params["down"])
    logits = (x @ params["embedding"].T).astype(jnp.float32) * batch["factor"][:, None, None]
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()


def transform(policy, **where):
    padding = {"padding": where.pop("padding")} if where else {}
    inner = optax.chain(
        jaxmp.clip_by_global_norm(0.15, **where), jaxmp.count_zeros(**where, **padding), optax.adamw(1e-2, eps=1e-3)
    )
    return jaxmp.mixed_precision(inner, POLICIES[policy], loss_scale=jaxmp.DynamicLossScale(2.0**10, hysteresis=1))


@functools.cache
def batches():
    rng = np.random.default_rng(0)
    drawn = []
    for i in range(4):
        tokens = rng.integers(0, VOCABULARY - 4, (BATCH, LENGTH + 1))  # four rows of the embedding are never looked up
        factor = np.ones(BATCH, np.float32)
        factor[3] = np.inf if i == 1 else 1.0
        drawn.append({"x": tokens[:, :-1].astype(np.int32), "y": tokens[:, 1:].astype(np.int32), "factor": factor})
    return drawn


@functools.cache
def run(mesh_name, regime="shard_map", policy="fp16"):
    """(params, masters, metrics of each step), whole, on the host."""
    if mesh_name == "single":
        layout, tx = None, transform(policy)
    else:
        mesh = jax.make_mesh(MESHES[mesh_name], AXES, axis_types=(AxisType.Auto,) * 3)
        layout = fsdp.layout_of(PARAMS, mesh, specs=TENSOR, min_size=9)
        where = {"axis_name": ("fsdp", "tensor"), "replicated": layout.specs, "padding": layout.padding}
        tx = transform(policy, **(where if regime == "shard_map" else {}))

    def step(params, opt_state, batch):
        if layout is None:
            loss_fn, reduce = loss_of, lambda grads: grads
        elif regime == "jit":
            loss_fn, reduce = (lambda p, b: loss_of(fsdp.gather(p, layout), b)), lambda grads: grads
        else:
            loss_fn = lambda p, b: loss_of(fsdp.gather(p, layout), b, lambda x: jax.lax.psum(x, "tensor"))  # noqa: E731
            reduce = lambda grads: jaxmp.reduce_gradients("data").update(  # noqa: E731
                fsdp.reduce_gradients(grads, layout), optax.EmptyState()
            )[0]
        # autodiff sums over the tensor axis, along which every shard sees the same rows
        axes = {"axis_name": ("data", "fsdp")} if layout is not None and regime == "shard_map" else {}
        _, grads = jaxmp.value_and_grad(loss_fn, **axes)(params, batch, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, reduce(grads), opt_state, params)

    params, opt_state = POLICIES[policy].cast_to_param(PARAMS), tx.init(PARAMS)
    compiled = jax.jit(step)
    if layout is not None:
        specs = (layout.specs, jaxmp.sharding_of(tx, PARAMS, layout.specs))
        lie = jax.tree.map(lambda s: NamedSharding(layout.mesh, s), specs, is_leaf=lambda x: isinstance(x, P))
        params, opt_state = jax.device_put((params, opt_state), lie)
        if regime == "shard_map":
            compiled = jax.jit(jax.shard_map(step, mesh=layout.mesh, in_specs=(*specs, ROWS), out_specs=specs))
        else:
            compiled = jax.jit(step, out_shardings=lie)
    metrics = []
    for batch in batches():
        if regime == "jit":
            batch = jax.device_put(batch, NamedSharding(layout.mesh, ROWS))
        params, opt_state = compiled(params, opt_state, batch)
        metrics.append(jax.tree.map(np.asarray, jaxmp.get_metrics(opt_state)))
    return jax.tree.map(np.asarray, (params, jaxmp.get_master_params(opt_state, params))), metrics


DECISIONS = ("loss_scale", "skipped", "skipped_steps", "growth_count", "hysteresis_left", "zero_grads")


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("mesh", "regime", "policy"),
    [("2x2x2", "shard_map", "fp16"), ("2x2x2", "jit", "fp16"), ("2x1x4", "shard_map", "fp32")],
)
def test_every_mesh_trains_as_one_device(mesh, regime, policy):
    (params, masters), metrics = run(mesh, regime, policy)
    (_, one_masters), one_metrics = run("single", policy=policy)
    assert [bool(m["skipped"]) for m in metrics] == [False, True, False, False]
    for got, expected in zip(metrics, one_metrics, strict=True):
        assert_exact({k: got[k] for k in DECISIONS}, {k: expected[k] for k in DECISIONS})
        assert_close(got["grad_norm"], expected["grad_norm"], rtol=10 * TOLERANCE[policy])
    assert metrics[0]["grad_norm"] > 0.15  # so that it clips
    assert_close(masters, one_masters, atol=TOLERANCE[policy])
    assert_exact(params["up"], masters["up"].astype(POLICIES[policy].param_dtype))


GRADS = jax.tree.map(lambda p: p * (p > 0), PARAMS)


@pytest.mark.thorough(1)
@pytest.mark.parametrize(("shape", "ord"), [((2, 4), 2), ((4, 2), np.inf), ((3, 2), 2)], ids=str)
def test_norms_and_zeros_are_those_of_the_whole_model(shape, ord):
    """A leaf that is cut over one axis only lies on every device of the other: it counts once, and exactly."""
    specs = {"embedding": P("fsdp"), "norm": P(), "up": P("fsdp", "tensor"), "down": P("tensor")}
    if shape[0] == 3:  # 3 divides none: over `tensor` alone
        specs = {name: P(*(None if part == "fsdp" else part for part in spec)) for name, spec in specs.items()}
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh = jax.make_mesh(shape, ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    where = {"axis_name": ("fsdp", "tensor"), "replicated": specs}

    counter = jaxmp.count_zeros(**where)

    def measure(grads):
        zeros = counter.update(grads, counter.init(grads))[1].zero_grads
        return jaxmp.global_norm(grads, ord=float(ord), **where), zeros

    norm, zeros = jax.jit(jax.shard_map(measure, mesh=mesh, in_specs=(specs,), out_specs=P()))(GRADS)
    flat = np.concatenate([g.ravel() for g in GRADS.values()]).astype(np.float64)
    assert_close(norm, np.float32(np.linalg.norm(flat, ord)), rtol=1e-6)
    assert_exact(zeros, np.float32(np.sum(flat == 0)))
