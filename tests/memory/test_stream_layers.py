"""Layers in host memory: the loss and the gradients of the plain model, and no more of the params on the device."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_close, assert_exact, assert_moved, assert_within_ulps
from jaxmp import offload
from jaxmp._src.devices import host_memory
from regimes import guarded

LAYERS, WIDTH, BATCH = 6, 8, 12


def layer(p, x):
    return jnp.tanh(x @ p["w"] + p["b"][None])


def make_params():
    w = np.random.default_rng(0).normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 3
    return {"w": jnp.asarray(w), "b": jnp.zeros((LAYERS, WIDTH))}


def make_batch():
    return jnp.asarray(np.random.default_rng(1).normal(size=(BATCH, WIDTH)), jnp.float32)


def plain(params, x):
    return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0]


def loss_and_grads(apply, params):
    return jax.jit(jax.value_and_grad(lambda p: jnp.sum(apply(p, make_batch()) ** 2)))(params)


@functools.cache
def of_the_plain_model():
    return jax.tree.map(np.array, loss_and_grads(plain, make_params()))


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    "options",
    [{"num_slices": 3, "offload_activations": True}, {"num_slices": 2, "checkpoint_activations": False}, {}],
    ids=str,
)
def test_loss_and_gradients_are_those_of_the_plain_model(options):
    loss, grads = loss_and_grads(offload.stream_layers(layer, **options), offload.to_host(make_params()))
    assert {g.sharding.memory_kind for g in grads.values()} == {"pinned_host"}
    assert loss.sharding.memory_kind == "device"
    # Sums of 6 layers, in another program.
    assert_within_ulps(jax.tree.map(np.array, (loss, grads)), of_the_plain_model(), 64)


@pytest.mark.parametrize(
    "options",
    [{"num_slices": 3, "offload_activations": True}, pytest.param({}, marks=pytest.mark.thorough(0))],
    ids=str,
)
def test_microbatches_sum_to_the_batch(options):
    apply = offload.stream_layers(layer, num_microbatches=4, **options)
    loss, grads = loss_and_grads(apply, offload.to_host(make_params()))
    assert {g.sharding.memory_kind for g in grads.values()} == {"pinned_host"}
    assert_close(jax.tree.map(np.array, (loss, grads)), of_the_plain_model(), rtol=1e-5, atol=1e-6)
    # The rows come out as they went in.
    rows, expected = (np.array(jax.jit(f)(make_params(), make_batch())) for f in (apply, plain))
    assert_close(rows, expected, atol=1e-6)


def test_params_on_the_device_and_shared_arguments():
    mask = jnp.arange(WIDTH) % 2 == 0

    def masked(p, xs, mask):
        x, extra = xs
        return jnp.where(mask[None], layer(p, x), x), extra

    apply = offload.stream_layers(masked, num_slices=2)
    x, extra = apply(make_params(), (make_batch(), jnp.arange(BATCH)), mask)
    assert_moved(np.array(x[:, 1::2]), np.array(make_batch()[:, 1::2]))
    assert extra.tolist() == list(range(BATCH))


def scans(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "scan":
            yield eqn
        for inner, *_ in jaxmp._src.programs.jaxprs.functions_of(eqn):
            yield from scans(inner)


@pytest.mark.parametrize(("checkpoint_activations", "offload_activations"), [(True, True), (False, False)])
def test_only_slices_are_on_the_device(checkpoint_activations, offload_activations):
    apply = offload.stream_layers(
        layer, num_slices=3, checkpoint_activations=checkpoint_activations, offload_activations=offload_activations
    )
    params = offload.to_host(make_params())
    gradient = jax.grad(lambda p: jnp.sum(apply(p, make_batch())))
    loops = scans(jax.make_jaxpr(gradient)(params).jaxpr)
    stacks = [v.aval for eqn in loops for v in (*eqn.invars, *eqn.outvars) if v.aval.shape[:1] == (3,)]
    weights = [a for a in stacks if a.shape == (3, 2, WIDTH, WIDTH)]
    assert weights and all(a.memory_space == jax.memory.Space.Host for a in weights)
    memories = {a.shape: a.memory_space.name for a in stacks if a.shape[-2:] == (BATCH, WIDTH)}
    expected = {(3, BATCH, WIDTH): "Host" if offload_activations else "Device"}
    assert memories == expected | ({} if checkpoint_activations else {(3, 2, BATCH, WIDTH): "Device"})


@pytest.mark.thorough(0)
def test_a_whole_step_with_params_gradients_and_state_on_the_host():
    policy = jaxmp.get_policy("fp16")
    inner = offload.stream_updates(optax.sgd(0.5, momentum=0.5), window_bytes=400)
    tx = jaxmp.mixed_precision(inner, policy)
    apply = offload.stream_layers(layer, num_slices=3)

    @jax.jit
    def step(params, opt_state, x):
        def loss_fn(params, x):
            return jnp.mean(apply(params, x).astype(jnp.float32) ** 2)

        loss, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=opt_state)
        return *jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    runs = []
    for on_host in (False, True):
        params, opt_state = policy.cast_to_param(make_params()), tx.init(make_params())
        if on_host:
            params, opt_state = offload.put((offload.to_host(params), opt_state))
        for number in range(4):
            x = make_batch().astype(jnp.float16) * (np.float16(np.inf) if number == 1 else np.float16(1))
            params, opt_state, loss = step(params, opt_state, x)
            assert {x.sharding.memory_kind for x in jax.tree.leaves((params, guarded(opt_state)))} == {
                "pinned_host" if on_host else "device"
            }
        runs.append(jax.tree.map(np.array, (params, opt_state, loss)))
    assert_close(runs[1], runs[0], rtol=1e-3, atol=1e-5)
    assert_exact(runs[1][1].scaling, runs[0][1].scaling)
    assert int(runs[1][1].skipped_steps) >= 1
    assert step._cache_size() == 2  # one for each place


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_slices": 4}, "num_slices must divide the number of layers.*got 4 for 6 layers. .*1, 2, 3, 6"),
        ({"num_microbatches": 5}, r"num_microbatches must divide the first axis of x; got 5 for shape \(12, 8\) at"),
    ],
)
def test_what_does_not_divide_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        offload.stream_layers(layer, **options)(make_params(), make_batch())


@pytest.mark.parametrize(("name", "count"), [("num_slices", 0), ("num_slices", 1.5), ("num_microbatches", True)])
def test_counts_are_positive_ints(name, count):
    with pytest.raises(ValueError, match=f"{name} must be an int >= 1; got {count!r}"):
        offload.stream_layers(layer, **{name: count})


def test_params_and_activations_that_do_not_fit():
    apply = offload.stream_layers(layer)
    with pytest.raises(ValueError, match="got a scalar at b. Write jax.tree.map"):
        apply({"w": jnp.ones((2, 3)), "b": 1.0}, make_batch())
    with pytest.raises(ValueError, match=r"stacked, .*, with one length; got 3 at b, 2 at w"):
        apply({"w": jnp.ones((2, 3)), "b": jnp.ones((3, 3))}, make_batch())
    with pytest.raises(ValueError, match="x must be in device memory; got host memory at <root> of x"):
        apply(make_params(), offload.to_host(make_batch()))
    with pytest.raises(TypeError, match=r"it took float16\[12, 8\] and returned float32\[12, 8\] at <root>. Cast the"):
        apply(make_params(), make_batch().astype(jnp.float16))
    with pytest.raises(TypeError, match="must return a value like its x; it took x of structure"):
        offload.stream_layers(lambda p, x: (x, x))(make_params(), make_batch())


def test_microbatches_of_value_and_grad_do_not_add_up_on_the_host():
    apply = offload.stream_layers(layer)
    value_and_grad = jaxmp.value_and_grad(lambda p, x: jnp.sum(apply(p, x)), accumulate=2)
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(make_params())
    with pytest.raises(ValueError, match="params must be on the device; got .* on the host"):
        value_and_grad(offload.to_host(make_params()), make_batch(), opt_state=opt_state)
    assert host_memory.first_on_host(make_params()) is None
