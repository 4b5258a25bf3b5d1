"""What `reduce_gradients` refuses: a place in a transform that decides on each device whether it runs, and no sums."""

import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxmp
from regimes import AXIS, mesh_of

DEVICES = 4
IN_BRANCHES = {
    "optax.MultiSteps": lambda inner: optax.MultiSteps(inner, 2),
    "optax.apply_if_finite": lambda inner: optax.apply_if_finite(inner, 2),
    "optax.conditionally_transform": lambda inner: optax.conditionally_transform(inner, lambda step: step % 2 == 0),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", IN_BRANCHES)
def test_a_transform_that_decides_about_the_step_stands_behind_the_reduction(name):
    """Inside of it, jax said that the types of two branches differ."""
    params, wrap, reduce = {"w": jnp.ones((16, 64))}, IN_BRANCHES[name], jaxmp.reduce_gradients(AXIS)

    def trace(inner, check_vma=True):
        tx = jaxmp.mixed_precision(inner, "fp32")
        step = lambda grads, state: tx.update(jax.tree.map(lambda g: g[0], grads), state, params)  # noqa: E731
        specs = {"mesh": mesh_of(), "in_specs": (P(AXIS), P()), "out_specs": P(), "check_vma": check_vma}
        return jax.eval_shape(jax.shard_map(step, **specs), {"w": jnp.ones((DEVICES, 16, 64))}, tx.init(params))

    inside, before = wrap(optax.chain(reduce, optax.sgd(0.1))), optax.chain(reduce, wrap(optax.sgd(0.1)))
    trace(before), trace(before, check_vma=False)
    message = rf"reduce_gradients must come before {name}; got it inside. Pass it as before= of jaxmp.mixed"
    with pytest.raises(ValueError, match=message):
        trace(inside)
    if name == "optax.apply_if_finite":
        with pytest.raises(ValueError, match=message):
            trace(inside, check_vma=False)
    else:  # it decides by a count, which is the same on all devices
        trace(inside, check_vma=False)


@pytest.mark.parametrize(
    "arguments", [{"dtype": jnp.int32}, {"dtype": "float8_e4m3fn"}, {"predivide": 0}, {"predivide": math.nan}], ids=str
)
def test_a_sum_that_is_none_is_refused(arguments):
    """They made zeros, NaN or gradients of the other sign."""
    tree = {"w": jnp.ones(8)}
    layout = jaxmp.fsdp.layout_of(tree, mesh_of(), AXIS, min_size=1)
    of_gather = {"reduce_dtype" if name == "dtype" else name: x for name, x in arguments.items()}
    for call in (
        lambda: jaxmp.reduce_gradients(AXIS, **arguments),
        lambda: jaxmp.fsdp.reduce_gradients(tree, layout, **arguments),
        lambda: jaxmp.fsdp.gather(tree, layout, **of_gather),
    ):
        with pytest.raises(ValueError, match=r"gradients are summed in float32|predivide must be positive and finite"):
            call()
