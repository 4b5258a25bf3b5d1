"""`jaxmp.memory.compiled`: XLA's own numbers of a step, whatever the step is."""

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp import memory

S, F32 = jax.ShapeDtypeStruct, jnp.float32


def by_hand(jitted, *args):
    sizes = jitted.lower(*args).compile().memory_analysis()
    unplaced = max(sizes.output_size_in_bytes - sizes.alias_size_in_bytes, 0)
    return sizes.argument_size_in_bytes + sizes.temp_size_in_bytes + unplaced


def step_of(policy, accumulate=1):
    """(step, its arguments as shapes) of two matmuls."""
    tx = jaxmp.mixed_precision(optax.sgd(1e-3, momentum=0.9), policy)
    params32 = {"w0": S((64, 512), F32), "w1": S((512, 32), F32)}

    def loss_fn(params, x):
        return jnp.mean((jnp.tanh(x @ params["w0"]) @ params["w1"]) ** 2)

    def step(params, opt_state, x):
        loss, grads = jaxmp.value_and_grad(loss_fn, policy=policy, accumulate=accumulate)(
            params, x, opt_state=opt_state
        )
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    stored = jax.eval_shape(jaxmp.get_policy(policy).cast_to_param, params32)
    return step, (stored, jax.eval_shape(tx.init, params32), S((4096, 64), F32))


@pytest.mark.parametrize("policy", ["bf16", pytest.param("fp32", marks=pytest.mark.thorough(0))])
def test_it_is_xlas_number_of_the_whole_step(policy):
    step, args = step_of(policy)
    donating = jax.jit(step, donate_argnums=(0, 1))
    expected = by_hand(donating, *args)
    assert memory.compiled(donating, *args) == memory.compiled(step, *args, donate_argnums=(0, 1)) == expected
    assert memory.compiled(step, *args) > expected  # without donation, params and state are there twice
    activations = 4096 * 512 * (4 if policy == "fp32" else 2)
    assert expected > sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args)) + activations
    assert memory.compiled(jax.jit(step_of(policy, accumulate=4)[0], donate_argnums=(0, 1)), *args) < expected


def test_arrays_and_shapes_say_the_same():
    args = S((8, 4), F32), S((4,), F32)
    arrays = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), args)
    step = lambda x, y: (x @ y, y + 1)  # noqa: E731
    assert memory.compiled(step, *arrays, donate_argnums=1) == memory.compiled(step, *args, donate_argnums=1)
    assert not any(x.is_deleted() for x in jax.tree.leaves(arrays))


@pytest.mark.parametrize("kind", [pytest.param("jit", marks=pytest.mark.thorough(0)), "shard_map"])
def test_on_a_mesh_it_is_that_of_one_device(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    step, (params, opt_state, x) = step_of("bf16")

    def per_device(params, opt_state, x):
        params, opt_state, loss = step(params, opt_state, x)
        return params, opt_state, jax.lax.pmean(loss, "data")

    def placed(tree, spec):
        return jax.tree.map(lambda x: S(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)), tree)

    args = placed(params, P()), placed(opt_state, P()), placed(x, P("data"))
    if kind == "shard_map":
        specs = {"in_specs": (P(), P(), P("data")), "out_specs": P(), "check_vma": False}
        whole = jax.shard_map(per_device, mesh=mesh, **specs)
    jitted = jax.jit(whole if kind == "shard_map" else step, donate_argnums=(0, 1))
    size = memory.compiled(jitted, *args)
    assert size == by_hand(jitted, *args)
    alone = memory.compiled(jax.jit(step_of("bf16")[0], donate_argnums=(0, 1)), params, opt_state, x)
    assert size < alone - 4096 * 512 * 2 // 2  # an eighth of the activations


def test_a_step_of_pmap():
    def step(params, x):
        return jax.tree.map(
            lambda p, g: p - jax.lax.pmean(g, "data"), params, jax.grad(lambda p: jnp.sum(x @ p))(params)
        )

    args = S((8, 64, 32), F32), S((8, 16, 64), F32)
    assert memory.compiled(jax.pmap(step, "data"), *args) >= (2 * 64 * 32 + 16 * 64) * 4


@pytest.mark.thorough(0)
def test_steps_of_nnx():
    net = nnx.Linear(8, 4, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(net, optax.sgd(1e-3), wrt=nnx.Param, policy="bf16")

    @nnx.jit
    def nnx_step(net, optimizer, x, y):
        loss, grads = jaxmp.nnx.value_and_grad(lambda net, x, y: jnp.mean((net(x) - y) ** 2))(
            net, x, y, opt_state=optimizer
        )
        optimizer.update(net, grads)
        return loss

    arguments = net, optimizer, jnp.ones((16, 8)), jnp.ones((16, 4))
    assert memory.compiled(nnx_step, *arguments) == by_hand(nnx_step, *arguments) > 0
    plain = nnx_step.__wrapped__  # under jax.jit its updates would be lost, and left out
    donated = {"donate_argnums": (0, 1)}
    size = memory.compiled(plain, *arguments, **donated)
    assert size == by_hand(nnx.jit(plain, **donated), *arguments) > by_hand(jax.jit(plain), *arguments)


def test_a_jitted_step_says_itself_what_it_donates():
    with pytest.raises(ValueError, match=r"a jitted step says itself what it donates; got donate_argnums=\(0, 1\)"):
        memory.compiled(jax.jit(jnp.add), 1.0, 2.0, donate_argnums=(0, 1))
