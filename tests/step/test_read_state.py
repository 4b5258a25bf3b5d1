"""What reads a state says so when it gets something else."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy
from flax import nnx
from flax.core import freeze

import jaxmp
from helpers import assert_exact, assert_moved

PARAMS = {"w": jnp.ones((3, 2))}
TX = jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
READERS = {
    "get_loss_scale": jaxmp.get_loss_scale,
    "get_metrics": jaxmp.get_metrics,
    "check_progress": jaxmp.check_progress,
    "get_master_params": lambda state: jaxmp.get_master_params(state, PARAMS),
    "keep_if_skipped": lambda state: jaxmp.keep_if_skipped(state, {"a": jnp.ones(2)}, {"a": jnp.zeros(2)}),
}
NO_STATES = {
    "params": PARAMS,
    "none": None,
    "module": nnx.Linear(3, 2, rngs=nnx.Rngs(0)),
    "dicts": {"scaling": {"loss_scale": jnp.ones(())}},  # as restored without a template
}


@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_state_is_refused(reader):
    for wrong in NO_STATES.values():
        with pytest.raises(
            TypeError, match=rf"{reader}.* must get the state of an optimizer; got \w+ without any. Pass opt_state"
        ):
            READERS[reader](wrong)
    with pytest.raises(TypeError, match=rf"{reader}.*; got the optimizer. Pass opt_state as tx.init\(params\)"):
        READERS[reader](TX)


def test_a_stacked_state_is_read_entry_by_entry():
    """Of an ensemble: outside of its vmap as inside, also where a square leaf has two axes of the ensemble's size."""
    tx = jaxmp.mixed_precision(
        optax.chain(optax.sgd(0.1), jaxmp.ema_params(0.5)), "fp16", loss_scale=jaxmp.DynamicLossScale(4.0, hysteresis=1)
    )
    state, params = jax.vmap(tx.init)({"w": jnp.ones((2, 2))}), {"w": jnp.ones((2, 2), jnp.float16)}
    for first in (1.0, np.nan):  # the first member skips the second step
        grads = {"w": jnp.float16([[first, first], [1, 1]])}
        params, state = jax.vmap(lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p))(grads, state, params)
    assert jaxmp.get_loss_scale(state).tolist() == [2, 4]
    one, zero = jnp.ones((2, 2)), jnp.zeros((2, 2))
    readers = {
        "kept": lambda s, p: jaxmp.keep_if_skipped(s, one[0] if p["w"].ndim == 1 else one, 0 * p["w"]),
        "average": lambda s, p: jaxmp.get_ema_params(s, p)["w"],
        "unscaled": lambda s, p: jaxmp.unscale({"w": p["w"]}, s)["w"],
    }
    for read in readers.values():
        assert_exact(read(state, params), jax.vmap(read)(state, params))
    with pytest.raises(ValueError, match=r"needs arrays stacked alike; got \(3,\) beside \(2,\)"):
        jaxmp.keep_if_skipped(state, jnp.ones(3), jnp.ones(3))
    loss_fn = lambda p: jnp.sum(p["w"].astype(jnp.float32))  # noqa: E731
    for step in (
        lambda: jaxmp.value_and_grad(loss_fn)(params, opt_state=state),
        lambda: jaxmp.apply_gradients(tx, params, state, params),
        lambda: tx.update(params, state, params),
    ):
        with pytest.raises(ValueError, match=r"must get one state; got one of a vmap or a pmap, stacked to \(2,\)"):
            step()
    assert_exact(jaxmp.keep_if_skipped(state, one, zero), np.float32([[0, 0], [1, 1]]))


def test_states_of_all_kinds_are_read():
    module = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    train_state = jaxmp.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=TX, policy="bf16")
    optimizers = optax.sgd(0.1), optax.adam(0.1), optax.chain(TX), optax.multi_transform({"x": TX}, "x")
    states = [tx.init(PARAMS) for tx in optimizers] + [(), train_state, train_state.opt_state]
    of_nnx = nnx.Optimizer(module, TX, wrt=nnx.Param)
    for reader, read in READERS.items():
        for state in states if reader == "get_master_params" else (*states, of_nnx):
            read(state)
    assert_exact(jaxmp.get_loss_scale(()), np.float32(1))  # a test that scales by hand


@pytest.mark.parametrize(("policy", "step"), [("fp16", "update"), ("fp32", "apply_gradients")])
def test_leaves_that_came_after_the_optimizer_are_named(policy, step):
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, loss_scale=None if policy == "fp32" else 2.0)
    state, params = tx.init(PARAMS), jaxmp.get_policy(policy).cast_to_param(PARAMS)

    def run(params):
        grads = jax.tree.map(jnp.ones_like, params)
        return tx.update(grads, state, params) if step == "update" else jaxmp.apply_gradients(tx, grads, state, params)

    with pytest.raises(ValueError, match="got a new adapter/b. Make the optimizer last"):
        run({"w": params["w"], "adapter": {"b": params["w"]}})
    with pytest.raises(ValueError, match="the leaves of tx.init; got no w"):
        run({})


def lora_job(policy, with_fp8=False):
    model = nnx.LoRALinear(16, 16, lora_rank=2, rngs=nnx.Rngs(0))
    if with_fp8:
        jaxmp.nnx.to_fp8(model, filter=lambda path, layer: True)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)
    optimizer = jaxmp.nnx.Optimizer(model, tx, wrt=nnx.LoRAParam, policy=policy)
    jaxmp.nnx.cast_to_param(model, policy)
    return model, optimizer


@pytest.mark.thorough(0)
@pytest.mark.parametrize("policy", ["bf16", "fp8"])
def test_params_that_the_optimizer_does_not_train_are_frozen(policy, tmp_path):
    """The params of a whole model, of which the optimizer trains the adapters: for statistics and export."""
    weight = nnx.LoRALinear(16, 16, lora_rank=2, rngs=nnx.Rngs(0)).kernel[...]
    model, optimizer = lora_job(policy, with_fp8=policy == "fp8")
    state, whole = optimizer.opt_state, nnx.state(model, nnx.Param)
    found = jaxmp.get_master_params(state, whole)
    adapters = jaxmp.get_master_params(state, nnx.state(model, nnx.Any(nnx.LoRAParam, jaxmp.nnx.Fp8Scale)))
    assert_moved(nnx.as_pure(found["lora"]), nnx.as_pure(adapters["lora"]))
    assert {str(x.dtype) for x in jax.tree.leaves(found)} == {"float32"}
    np.testing.assert_allclose(found["kernel"][...], weight, rtol=2**-8, atol=1e-3)
    jaxmp.checkpoint.save_safetensors(tmp_path / "w", found, dtype=jnp.float32)
    tensors = safetensors.numpy.load_file(tmp_path / "w")
    assert_moved(tensors["lora.lora_a"], found["lora"]["lora_a"][...])
    assert_moved(tensors["kernel"], found["kernel"][...])
    stats = jaxmp.monitor.step_stats(nnx.state(model, nnx.LoRAParam), state, whole)
    assert stats.params["kernel"]["amax"] == jnp.max(jnp.abs(found["kernel"][...]))
    assert ("kernel" in stats.probes) == (policy == "fp8")  # in float32 it may be one that trains without a master


def test_masters_without_their_params_are_named():
    model, optimizer = lora_job("bf16")
    with pytest.raises(ValueError, match="got no .*lora_b"):
        jaxmp.get_master_params(optimizer.opt_state, nnx.state(model, lambda path, x: "lora_b" not in path))
    model, optimizer = lora_job("fp8", with_fp8=True)
    with pytest.raises(ValueError, match=r"got no fp8 scale .*log2_scale. Pass .*nnx.Any\(wrt, jaxmp.nnx.Fp8Scale"):
        jaxmp.get_master_params(optimizer.opt_state, nnx.state(model, nnx.LoRAParam))


def test_keep_if_skipped_keeps_the_containers_and_names_what_is_missing():
    """Modules return dicts or FrozenDicts by what they got; the state of a loop has one structure."""
    new, old = (
        {"norm": {"mean": jnp.ones(2), "var": jnp.ones(1)}},
        {"norm": {"mean": jnp.zeros(2), "var": jnp.zeros(1)}},
    )
    for given, before in ((freeze(new), old), (new, freeze(old))):
        kept = jaxmp.keep_if_skipped(TX.init(PARAMS), given, before)
        assert type(kept) is type(before)
        assert_moved(jax.tree.leaves(kept), jax.tree.leaves(new))
    with pytest.raises(ValueError, match="same tree structure; norm/var is in old only. Pass the whole tree"):
        jaxmp.keep_if_skipped(TX.init(PARAMS), {"norm": {"mean": jnp.ones(2)}}, old)


SCALES = {"dense": {"kernel": jnp.ones((2, 2)), "fp8_lhs_e4m3_log2_scale": jnp.float32(3.0)}}
AMAXES = {"dense": {"kernel": jnp.ones((2, 2)), "fp8_lhs_e4m3_log2_scale": jnp.zeros(3)}}


@pytest.mark.parametrize(("reader", "tree", "of"), [("get_scales", SCALES, "params"), ("get_amaxes", AMAXES, "grads")])
def test_readers_of_fp8_scales_refuse_shapes(reader, tree, of):
    """`jax.eval_shape` takes the readers."""
    read, shapes = getattr(jaxmp.fp8, reader), jax.eval_shape(lambda: tree)
    rule = rf"{reader} reads numbers; got a jax.ShapeDtypeStruct at dense/fp8_lhs_e4m3_log2_scale"
    with pytest.raises(TypeError, match=rf"{rule}. Call jax.eval_shape\(jaxmp.fp8.{reader}, {of}\)"):
        read(shapes)
    scalars = jax.eval_shape(read, shapes)
    assert scalars["dense/fp8_lhs_e4m3_log2_scale"] == jax.ShapeDtypeStruct((), jnp.float32)
    assert read(tree).keys() == scalars.keys()
