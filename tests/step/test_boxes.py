"""A box of the user's own around each param: a pytree node with one array and static metadata, whose array is `value`.

No file of jaxmp knows these classes; flax's own box, `nn.Partitioned`, is beside them. The name of the field decides
about the path alone: a layer with one param is such a node too, and its param keeps its name.
"""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program
from jaxmp import checkpoint
from regimes import AXIS, mesh_of


@functools.partial(jax.tree_util.register_dataclass, data_fields=["value"], meta_fields=["names"])
@dataclasses.dataclass
class Registered:
    value: Any
    names: tuple[str, ...]


@struct.dataclass
class OfFlax:
    value: Any
    names: tuple[str, ...] = struct.field(pytree_node=False)


class OfEquinox(eqx.Module):
    value: Any
    names: tuple[str, ...] = eqx.field(static=True)


BOXES = {kind.__name__: kind for kind in (Registered, OfFlax, OfEquinox, nn.Partitioned)}
PARAMS = {"dense": {"kernel": np.full((16, 32), 0.7, np.float32)}, "norm": {"scale": np.ones(32, np.float32)}}
FORMS = {
    "fp32": ("fp32", optax.adamw, {}),
    "fp16": ("fp16", optax.adamw, {}),
    "split": ("bf16", optax.adamw, {"remainder_bits": 16}),
    "split8": ("bf16", optax.adamw, {"remainder_bits": 8}),
    "fused": ("bf16", jaxmp.fused_adamw, {}),
}
LATER = pytest.mark.thorough(0)
CASES = [
    ("OfEquinox", "split"),
    ("Partitioned", "fp16"),
    pytest.param("Registered", "fp32", marks=LATER),
    pytest.param("Registered", "split8", marks=LATER),
    pytest.param("Registered", "fused", marks=LATER),
    pytest.param("OfFlax", "fp16", marks=LATER),
]


def boxed(kind, tree=PARAMS):
    return jax.tree_util.tree_map_with_path(lambda path, x: kind(jnp.asarray(x), (path[-1].key, "axis")), tree)


def opened(tree):
    return jax.tree.map(lambda box: box.value, tree, is_leaf=lambda x: hasattr(x, "names"))


@functools.cache
def trained(kind, form):
    """(tx, params, opt_state) after three steps; `kind` None: without boxes."""
    name, inner, options = FORMS[form]
    policy = jaxmp.get_policy(name, keep_fp32=("norm/scale",))
    tx = jaxmp.mixed_precision(inner(1e-2), policy, **options)
    params32 = boxed(BOXES[kind]) if kind else jax.tree.map(jnp.asarray, PARAMS)
    state, params = tx.init(params32), policy.cast_to_param(params32)
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    for factor in (64.0, np.nan, -8.0):
        params, state = step(jax.tree.map(lambda p: jnp.full_like(p, factor), params), state, params)  # noqa: B023
    return tx, params, state


@pytest.mark.parametrize(("kind", "form"), CASES)
def test_a_step_is_that_without_boxes(kind, form):
    _, params, state = trained(kind, form)
    _, plain, plain_state = trained(None, form)
    assert params["dense"]["kernel"].names == ("kernel", "axis")
    assert_same_program(opened(params), plain)
    assert_same_program(jax.tree.leaves(state), jax.tree.leaves(plain_state))
    assert plain["norm"]["scale"].dtype == jnp.float32  # keep_fp32 fits norm/scale, box or not
    masters = jaxmp.get_master_params(state, params)
    assert_same_program(opened(masters), jaxmp.get_master_params(plain_state, plain))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("kind", BOXES)
def test_updates_and_frozen_params(kind):
    labels = {"dense": "train", "norm": "frozen"}
    inner = optax.multi_transform({"train": optax.sgd(1.0), "frozen": optax.set_to_zero()}, labels)
    tx, params32 = jaxmp.mixed_precision(inner, "bf16"), boxed(BOXES[kind])
    params = jaxmp.get_policy("bf16").cast_to_param(params32)
    state = tx.init(params32)
    assert len(jax.tree.leaves(state.master_params)) == 1
    update, grads = jax.jit(tx.update), jax.tree.map(lambda p: jnp.full_like(p, 0.5), params)
    for _ in range(2):
        updates, state = update(grads, state, params)
        params = optax.apply_updates(params, updates)
    assert_exact(opened(params)["norm"]["scale"], np.ones(32, jnp.bfloat16))
    assert_exact(
        opened(jaxmp.get_master_params(state, params))["dense"]["kernel"], np.float32(0.7) - np.ones((16, 32), "f4")
    )


@pytest.mark.parametrize(("kind", "form"), [CASES[0], CASES[-1]])
def test_a_checkpoint_comes_back_with_boxes_or_without(kind, form, tmp_path):
    (tx, params, state), (_, plain, plain_state) = trained(kind, form), trained(None, form)
    with checkpoint.manager(tmp_path / "run") as steps:
        checkpoint.save(steps, 1, params=params, opt_state=state)
        steps.wait_until_finished()
        own = checkpoint.restore(steps, tx, params=params)
        bare = checkpoint.restore(steps, tx, params=plain)
    assert_moved((own.params, own.opt_state), (params, state))
    assert_moved((bare.params, bare.opt_state), (plain, plain_state))


def test_boxes_keep_their_shardings():
    tx, params, state = trained("OfEquinox", "split")
    mesh = mesh_of()
    shard = lambda tree: jax.device_put(  # noqa: E731
        tree, jax.tree.map(lambda x: NamedSharding(mesh, P(AXIS) if x.ndim else P()), tree)
    )
    step = jax.jit(functools.partial(jaxmp.apply_gradients, tx))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 4.0), params)
    spread = step(shard(grads), shard(state), shard(params))
    assert spread[0]["dense"]["kernel"].value.sharding.spec == P(AXIS)
    assert_exact(jax.tree.leaves(spread[0]), jax.tree.leaves(step(grads, state, params)[0]))


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(16, dot_general_cls=jaxmp.linen.Fp8DotGeneral, dtype=jnp.bfloat16)(x)


@pytest.mark.thorough(0)
def test_fp8_scales_are_found_in_boxes():
    net, x = Net(), jnp.ones((16, 16))
    plain32 = net.init(jax.random.key(0), x)["params"]
    policy = jaxmp.get_policy("bf16")
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy, recipe=jaxmp.fp8.DelayedScaling(amax_history_len=4))

    def run(params32, bare):
        params, state = policy.cast_to_param(params32), tx.init(params32)

        def loss_fn(params):
            return jnp.mean(net.apply({"params": bare(params)}, x).astype(jnp.float32) ** 2)

        @jax.jit
        def step(params, state):
            _, grads = jaxmp.value_and_grad(loss_fn)(params, opt_state=state)
            return jaxmp.apply_gradients(tx, grads, state, params)

        for _ in range(2):
            params, state = step(params, state)
        return bare(params), jaxmp.get_metrics(state)

    params, metrics = run(boxed(OfFlax, plain32), opened)
    assert metrics["fp8/unused"] == 0
    assert_same_program((params, metrics), run(plain32, lambda params: params))


def test_another_name_is_a_level_of_the_path():
    """As that of a layer with one param; a pattern that does not fit says so."""

    @struct.dataclass
    class Embedding:
        weight: Any
        name: str = struct.field(pytree_node=False, default="")

    params32 = {"embed": Embedding(jnp.ones(4)), "head": Embedding(jnp.ones(4))}
    kept = lambda *patterns: jax.tree.map(  # noqa: E731
        lambda x: x.dtype.name, jaxmp.get_policy("bf16", keep_fp32=patterns).cast_to_param(params32)
    )
    for pattern in ("embed/weight", "embed/*"):
        assert (kept(pattern)["embed"].weight, kept(pattern)["head"].weight) == ("float32", "bfloat16")
    with pytest.warns(UserWarning, match="'embed' fits no param.*embed/weight"):
        jaxmp.mixed_precision(optax.sgd(0.1), jaxmp.get_policy("bf16", keep_fp32=("embed",))).init(params32)
