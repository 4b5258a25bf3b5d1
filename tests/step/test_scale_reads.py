"""A forgotten `jaxmp.value_and_grad` is warned of while the step is traced, and nothing else is."""

import contextlib
import functools
import warnings
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from jaxmp._src.step import scale_reads

X = np.ones((4, 2), np.float32)
POLICY = jaxmp.get_policy("fp16")
PARAMS = {"w": jnp.ones((2, 3), jnp.float16)}
NOBODY, TWICE = "nobody read cannot have multiplied", "got the scale that an earlier update in this trace made"
ANOTHER = "got the opt_state of value_and_grad, and another opt_state of the update"


@contextlib.contextmanager
def fresh_process():
    """As if nothing had read a scale; warnings are errors."""
    with mock.patch.object(scale_reads, "MEMORY", scale_reads.Reads()), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "masters should start from float32 params")
        yield


def loss_fn(params, x):
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) ** 2)


def mixed(**kwargs):
    return jaxmp.mixed_precision(optax.sgd(0.1), POLICY, **kwargs)


def forgotten(tx):
    def step(params, state, x):
        _, grads = jax.value_and_grad(loss_fn)(params, x)
        return jaxmp.apply_gradients(tx, grads, state, params)

    return step


def right(tx):
    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    return step


def trace(step, *args):
    return jax.eval_shape(jax.jit(step), *args)


def test_a_forgotten_value_and_grad_is_warned_of_in_each_step():
    """Also where another step of the same params is right, and where the scale is read to be shown."""
    tx = mixed()
    state = tx.init(PARAMS)

    def shown(params, state, x):
        params, state = forgotten(tx)(params, state, x)
        return params, state, jaxmp.get_loss_scale(state)

    with fresh_process():
        jaxmp.get_loss_scale(state)
        trace(right(tx), PARAMS, state, X)
        for step in (forgotten(tx), forgotten(tx), shown):
            with pytest.warns(jaxmp.UnreadLossScale, match=f"{NOBODY}.*in place of jax.value_and_grad"):
                trace(step, PARAMS, state, X)
        trace(right(tx), PARAMS, state, X)
    with fresh_process(), pytest.warns(jaxmp.UnreadLossScale, match=NOBODY):
        state = jaxmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones((2, 3))}, tx=tx, policy=POLICY)
        trace(lambda s: s.apply_gradients(grads=jax.grad(loss_fn)(s.params, X)), state)


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_scaled_gradients_and_an_optimizer_without_a_scale(jitted):
    plain = optax.sgd(0.1)
    wide = {"w": jnp.ones((2, 3))}

    def step(params, state, plain_state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        return jaxmp.apply_gradients(plain, grads, plain_state, params)

    run = jax.jit(step) if jitted else step
    state = mixed().init(wide)
    with fresh_process(), pytest.warns(jaxmp.UnreadLossScale, match="an optimizer that has none"):
        run(wide, state, plain.init(wide), X)
    unscaled = jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(wide)
    if not jitted:  # in a trace nobody knows that the scale is 1
        with fresh_process():
            run(wide, unscaled, plain.init(wide), X)


def scan_of_steps(tx):
    def steps(params, state, x):
        step = right(tx)
        return jax.lax.scan(lambda carry, x: (step(*carry, x), None), (params, state), jnp.stack([x, x]))[0]

    return steps


def two_steps(tx):
    step = right(tx)
    return lambda params, state, x: step(*step(params, state, x), x)


def by_hand(tx):
    def step(params, state, x):
        scale = jaxmp.get_loss_scale(state)
        grads = jax.grad(lambda p: loss_fn(p, x) * scale)(params)
        return jaxmp.apply_gradients(tx, grads, state, params)

    return step


def accumulated(tx):
    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(loss_fn, accumulate=2)(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    return step


def two_losses(tx):
    def step(params, state, x):
        parts = [jaxmp.value_and_grad(loss_fn)(params, x * i, opt_state=state)[1] for i in (1, 2)]
        return jaxmp.apply_gradients(tx, jax.tree.map(jnp.add, *parts), state, params)

    return step


@pytest.mark.thorough(2)
@pytest.mark.parametrize("make", [right, scan_of_steps, two_steps, by_hand, accumulated, two_losses])
def test_scales_that_were_read(make):
    tx = mixed()
    with fresh_process():
        trace(make(tx), PARAMS, tx.init(PARAMS), X)


def test_gradients_of_another_program():
    """Of a jitted function of their own, of an earlier call, and outside of jit."""
    tx = mixed()
    state = tx.init(PARAMS)
    with fresh_process():
        grads = jax.jit(lambda p, s: jaxmp.value_and_grad(loss_fn)(p, X, opt_state=s)[1])(PARAMS, state)
        trace(lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p), grads, state, PARAMS)
    with fresh_process():  # nothing is traced
        tx.update(PARAMS, state, PARAMS)
    with fresh_process():
        shared = jaxmp.shared_loss_scale()
        jaxmp.get_loss_scale(shared.init())
        trace(lambda g, s, p, h: shared.apply_gradients(tx, g, s, p, h), grads, state, PARAMS, shared.init())
    with fresh_process():  # a plain number is known without reading
        static = mixed(loss_scale=4.0)
        trace(lambda g, s, p: static.update(g, s, p), grads, static.init(PARAMS), PARAMS)
        none = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
        bf16 = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
        trace(lambda g, s, p: none.update(g, s, p), bf16, none.init(bf16), bf16)


def test_the_same_gradients_twice_are_warned_of():
    """The second update divides by a scale that the first has made."""
    tx = mixed()

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        params, state = jaxmp.apply_gradients(tx, grads, state, params)
        return jaxmp.apply_gradients(tx, grads, state, params)

    def step_of_other_arrays(params, state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        params, state = jaxmp.apply_gradients(tx, grads, state, params)
        return jaxmp.apply_gradients(tx, jax.tree.map(jnp.negative, grads), state, params)

    with fresh_process(), pytest.warns(jaxmp.UnreadLossScale, match=ANOTHER):
        trace(step, PARAMS, tx.init(PARAMS), X)
    with fresh_process(), pytest.warns(jaxmp.UnreadLossScale, match=TWICE):
        trace(step_of_other_arrays, PARAMS, tx.init(PARAMS), X)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["argument", "closed over", "eager", "update", "in a scan", "nnx"])
def test_a_stale_opt_state_is_warned_of(how):
    tx = mixed()
    first = tx.init(PARAMS)

    def step(params, state, old):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, X, opt_state=old)
        if how == "update":
            return tx.update(grads, state, params)
        return jaxmp.apply_gradients(tx, grads, state, params)

    def in_nnx():
        model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
        optimizer, other = (jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy=POLICY) for _ in range(2))
        loss = lambda m: jnp.mean(m(X.astype(np.float16)).astype(jnp.float32))  # noqa: E731
        grads = jaxmp.nnx.value_and_grad(loss)(model, opt_state=other.opt_state)[1]
        optimizer.update(model, grads)

    run = {
        "closed over": lambda: trace(lambda p, s: step(p, s, first), PARAMS, tx.init(PARAMS)),
        "eager": lambda: step(PARAMS, tx.init(PARAMS), first),
        "in a scan": lambda: trace(
            lambda p, s, old: jax.lax.scan(lambda c, _: (step(*c, old), None), (p, s), None, length=2)[0],
            *(PARAMS, first, first),
        ),
        "nnx": in_nnx,
    }.get(how, lambda: trace(step, PARAMS, tx.init(PARAMS), first))
    with fresh_process(), pytest.warns(jaxmp.UnreadLossScale, match=ANOTHER):
        run()


def branches(tx):
    """The gradients are closed over, the state is passed: one state, and two names for its scale."""

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        update = lambda p, s: jaxmp.apply_gradients(tx, grads, s, p)  # noqa: E731
        return jax.lax.cond(jnp.sum(x) > 0, update, lambda p, s: (p, s), params, state)

    return step


def inner_jit(tx):
    def step(params, state, x):
        grads = jax.jit(lambda p, s: jaxmp.value_and_grad(loss_fn)(p, x, opt_state=s)[1])(params, state)
        return jax.jit(lambda g, s, p: jaxmp.apply_gradients(tx, g, s, p))(grads, state, params)

    return step


def averaged(tx):
    def step(params, state, x):
        run = jax.pmap(lambda x: right(tx)(params, state, x), axis_name="data")
        return run(x[:2, None])

    return step


@pytest.mark.thorough(1)
@pytest.mark.parametrize("make", [right, two_steps, branches, inner_jit, averaged])
@pytest.mark.parametrize("jitted", [True, False])
def test_the_state_that_scaled_the_gradients(make, jitted):
    tx = mixed()
    step = jax.jit(make(tx)) if jitted else make(tx)
    with fresh_process():
        step(PARAMS, tx.init(PARAMS), X)


def test_branches_from_one_state():
    """A comparison takes several steps from one state, each with its own gradients."""
    tx = mixed()
    first = tx.init(PARAMS)
    with fresh_process():
        for _ in range(2):
            params, state = right(tx)(PARAMS, first, X)
            right(tx)(params, state, X)


def test_two_optimizers_with_a_scale_each():
    """One model's gradients come from outside, the other's are computed here."""
    tx = mixed()

    def step(params, state, other_state, other_grads, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        new = jaxmp.apply_gradients(tx, grads, state, params)
        return new, jaxmp.apply_gradients(tx, other_grads, other_state, params)

    with fresh_process():
        trace(step, PARAMS, tx.init(PARAMS), tx.init(PARAMS), PARAMS, X)


def test_in_nnx_and_with_a_grad_scaler():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, mixed(), wrt=nnx.Param, policy=POLICY)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = jaxmp.nnx.value_and_grad(lambda m, x: jnp.mean(m(x)), policy=POLICY)(
            model, x, opt_state=optimizer.opt_state
        )
        optimizer.update(model, grads)
        return loss

    with fresh_process():
        step(model, optimizer, X)
        step(model, optimizer, X[:2])

    def with_scaler(params, scaler, x):
        return jax.grad(lambda p: scaler.scale(loss_fn(p, x)))(params)

    with fresh_process():
        trace(with_scaler, PARAMS, jaxmp.GradScaler(), X)
        tx = mixed()
        trace(lambda g, s, p: tx.update(jax.tree.map(jnp.negative, g), s, p), PARAMS, tx.init(PARAMS), PARAMS)


def test_gradients_in_the_place_of_params_are_refused():
    tx, params = jaxmp.mixed_precision(optax.sgd(0.1), "fp16"), {"w": jnp.ones(3, jnp.float16)}

    def step(params, opt_state):
        _, grads = jaxmp.value_and_grad(lambda p: jnp.sum(p["w"].astype(jnp.float32)))(params, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, params, opt_state, grads)

    for run in (step, jax.jit(step)):
        with pytest.raises(TypeError, match="got the gradients of value_and_grad as params"):
            run(params, tx.init(params))


def clipped(grads):
    norm = optax.tree.norm(grads)
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / norm), grads)


CHANGED = {
    "a clip by hand": clipped,
    "optax's clip": lambda g: optax.clip_by_global_norm(1.0).update(g, optax.EmptyState())[0],
    "a clip of elements, jitted": jax.jit(lambda g: jax.tree.map(lambda x: jnp.clip(x, -1, 1), g)),
    "normalized": lambda g: jax.tree.map(lambda x: x / jnp.max(jnp.abs(x)), g),
    "squared": lambda g: jax.tree.map(jnp.square, g),
}
LINEAR = {
    "averaged": lambda g: jax.tree.map(lambda x: jax.lax.pmean(x, "data"), g),
    "cast": lambda g: jax.tree.map(lambda x: x.astype(jnp.float32) * 0.5, g),
    "added up": lambda g: jax.tree.map(lambda x: sum([jnp.zeros_like(x), x, x]) / 2, g),
    "in a jitted function": jax.jit(lambda g: jax.tree.map(lambda x: -x.reshape(-1)[::-1].reshape(x.shape), g)),
    "finite ones": lambda g: jax.tree.map(lambda x: jnp.where(jnp.isfinite(x), x, 0), g),
    "in a loop, which is not known": lambda g: jax.lax.fori_loop(0, 2, lambda _, g: jax.tree.map(jnp.tanh, g), g),
    "masked": lambda g: jax.tree.map(lambda x: x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape), g),
}


def changed_by(change, policy="fp16"):
    policy = jaxmp.get_policy(policy)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), policy)

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, change(grads), state, params)

    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])
    P = jax.sharding.PartitionSpec
    run = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False)
    params32 = {"w": jnp.ones((2, 3))}
    return trace(run, policy.cast_to_param(params32), tx.init(params32), X)


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", CHANGED)
def test_scaled_gradients_that_are_clipped_are_warned_of(name):
    with fresh_process(), pytest.warns(jaxmp.UnreadLossScale, match="must not be clipped or normalized"):
        changed_by(CHANGED[name])
    with fresh_process():  # without a scale it is right
        changed_by(CHANGED[name], "bf16")


def test_gradients_that_were_made_by_hand_are_not_asked_about():
    tx = mixed()

    def step(params, state):
        jaxmp.get_loss_scale(state)
        grads = jax.tree.map(lambda p: jnp.full_like(p, 3.0) / jnp.sqrt(2.0), params)
        return jaxmp.apply_gradients(tx, grads, state, params)

    with fresh_process():
        trace(step, PARAMS, tx.init(PARAMS))


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", LINEAR)
def test_scaled_gradients_may_be_averaged(name):
    with fresh_process():
        changed_by(LINEAR[name])


SAFE_QUOTIENTS = {  # they keep a quotient from 0 / 0, and no more
    "an addend": lambda g, n: g / (n + 1e-8) * n,
    "a floor": lambda g, n: g / jnp.maximum(n, 1e-12) * n,
    "a ratio within bounds": lambda g, n: g * jnp.clip(n / (2 * n + 1e-4), 0, 2),
    "a projection": lambda g, n: g - jnp.vdot(g, g) / (jnp.vdot(g, g) + 1e-8) * g / 2,
    "one in place of zero": lambda g, n: g / jnp.where(n == 0, 1.0, n) * n,
    "one in place of zero, the other way": lambda g, n: g / jnp.where(n > 0, n, 1.0) * n,
    "one in place of what is small": lambda g, n: g / jnp.where(n < 1e-6, 1.0, n) * n,
    "zero from the left": lambda g, n: g / jnp.where(0 < n, n, 1.0) * n,
    "steps of 8 bits": lambda g, n: jnp.round(g / jnp.where(n == 0, 1.0, n / 127)) * (n / 127),
}
NOT_SAFE = {
    "a large addend": lambda g, n: g / (n + 1.0),
    "an upper bound": lambda g, n: jnp.minimum(g, 1e-5),
    "a bound": lambda g, n: g / jnp.where(n < 1.0, 1.0, n),
    "what is not scaled, where a mask is 0": lambda g, n: jnp.where(jnp.arange(g.size).reshape(g.shape) > 0, g, 0.5),
    "a choice by sign": lambda g, n: jnp.where(g < 0, 0.5, g),
}


@pytest.mark.parametrize("name", [*SAFE_QUOTIENTS, *NOT_SAFE])
def test_what_keeps_a_quotient_from_zero_is_no_clip(name):
    def change(grads):
        n = jnp.sqrt(sum(jnp.sum(g.astype(jnp.float32) ** 2) for g in jax.tree.leaves(grads)))
        of_leaf = (SAFE_QUOTIENTS | NOT_SAFE)[name]
        return jax.tree.map(lambda g: of_leaf(g.astype(jnp.float32), n), grads)

    is_told = name in NOT_SAFE
    told = pytest.warns(jaxmp.UnreadLossScale, match="must not be clipped") if is_told else contextlib.nullcontext()
    with fresh_process(), told:
        changed_by(change)
    with fresh_process(), told if is_told else contextlib.nullcontext():
        changed_by(jax.jit(change))


def clipped_by_optax(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


def scale_of(state):
    return jaxmp.get_loss_scale(state)


BEFORE_THE_UPDATE = {  # gradients, state and params -> what the update gets: whether it is warned of, and how
    "unscaled and clipped": (lambda g, s, p: clipped_by_optax(jaxmp.unscale(g, s)), "divided by the loss scale before"),
    "unscaled, times 1": (lambda g, s, p: jax.tree.map(lambda x: x * 1.0, jaxmp.unscale(g, s)), "jaxmp.unscale"),
    "unscaled by hand": (
        lambda g, s, p: jax.tree.map(lambda x: x / scale_of(s), g),
        "divided by the loss scale before",
    ),
    "by its inverse": (lambda g, s, p: jax.tree.map(lambda x: x * (1 / scale_of(s)), g), "divided by the loss scale"),
    "scaled twice": (lambda g, s, p: jax.tree.map(lambda x: x * scale_of(s), g), "the loss scale multiplied again"),
    "clipped": (lambda g, s, p: clipped_by_optax(g), "must not be clipped"),
    "with weight decay": (lambda g, s, p: jax.tree.map(lambda g, p: g + 0.1 * p, g, p), "added to what is not scaled"),
    "with scaled noise": (
        lambda g, s, p: jax.tree.map(lambda g: g + scale_of(s) * jax.random.normal(jax.random.key(0), g.shape), g),
        None,
    ),
    "clipped by hand": (
        lambda g, s, p: jax.tree.map(lambda x: jnp.clip(x / scale_of(s), -1, 1) * scale_of(s), g),
        None,
    ),
    "with scaled decay": (lambda g, s, p: jax.tree.map(lambda g, p: g + 0.1 * p * scale_of(s), g, p), None),
    "scaled again": (
        lambda g, s, p: jax.tree.map(lambda x: x * scale_of(s), clipped_by_optax(jaxmp.unscale(g, s))),
        None,
    ),
    "by a ratio": (
        lambda g, s, p: jax.tree.map(lambda x: x * jnp.minimum(1, 1 / optax.tree.norm(jaxmp.unscale(g, s))), g),
        None,
    ),
    "where params are": (lambda g, s, p: jax.tree.map(lambda g, p: jnp.where(p > 0, g, 0), g, p), None),
    "with noise": (
        lambda g, s, p: jax.tree.map(lambda g: g + 0.1 * jax.random.normal(jax.random.key(0), g.shape, g.dtype), g),
        "added to what is not scaled",
    ),
    "with a pull to other params": (
        lambda g, s, p: jax.tree.map(lambda g, p, q: g + 0.1 * (p - q), g, p, PARAMS),
        "added to what is not scaled",
    ),
    "with another loss": (
        lambda g, s, p: jax.tree.map(jnp.add, g, jax.grad(loss_fn)(p, X)),
        "added to what is not scaled",
    ),
    "with another loss, scaled": (
        lambda g, s, p: jax.tree.map(jnp.add, g, jax.grad(lambda p: loss_fn(p, X) * scale_of(s))(p)),
        None,
    ),
    "with zeros": (lambda g, s, p: jax.tree.map(lambda g: g + np.zeros(g.shape, g.dtype), g), None),
}


@pytest.mark.thorough(3)
@pytest.mark.parametrize("name", BEFORE_THE_UPDATE)
@pytest.mark.parametrize("loss_scale", ["auto", 1024.0], ids=["dynamic", "static"])
def test_gradients_that_were_changed_before_the_update(name, loss_scale):
    change, said = BEFORE_THE_UPDATE[name]
    tx = mixed(loss_scale=loss_scale)

    def step(params, state):
        _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, X, opt_state=state)
        return jaxmp.apply_gradients(tx, change(grads, state, params), state, params)

    with fresh_process(), contextlib.nullcontext() if said is None else pytest.warns(jaxmp.UnreadLossScale, match=said):
        trace(step, PARAMS, tx.init(PARAMS))


def noisy(grads, key, step):
    return jax.tree.map(lambda g: g + jnp.cos(step) * jax.random.normal(key, g.shape, g.dtype), grads)


def damped(grads, key, step):
    return jax.tree.map(lambda g: g * jnp.exp(-0.1 * step) * jax.random.bernoulli(key, 0.5, g.shape), grads)


@pytest.mark.parametrize(("change", "is_told"), [(noisy, True), (damped, False)])
@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_a_key_and_a_step_hold_no_scale(change, is_told, key):
    tx = mixed()

    def step(params, state, x, key, step):
        _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, change(grads, key, step), state, params)

    told = pytest.warns(jaxmp.UnreadLossScale, match="added to what") if is_told else contextlib.nullcontext()
    with fresh_process(), told:
        trace(step, PARAMS, tx.init(PARAMS), X, key, jnp.int32(3))


def test_gradients_of_a_former_step_may_be_added():
    tx = mixed()

    def step(params, state, x, total):
        _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, jax.tree.map(jnp.add, grads, total), state, params)

    with fresh_process():
        trace(step, PARAMS, tx.init(PARAMS), X, PARAMS)


@pytest.mark.parametrize("is_clipped", [True, False])
def test_gradients_of_single_rows_are_clipped_after_the_update_unscales(is_clipped):
    tx = mixed()

    def step(params, state, xs):
        def of_row(x):
            _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, x, opt_state=state)
            return clipped(grads) if is_clipped else grads

        grads = jax.tree.map(lambda g: jnp.mean(g, 0), jax.vmap(of_row)(xs))
        return jaxmp.apply_gradients(tx, grads, state, params)

    told = pytest.warns(jaxmp.UnreadLossScale, match="must not be clipped") if is_clipped else contextlib.nullcontext()
    with fresh_process(), told:
        trace(step, PARAMS, tx.init(PARAMS), jnp.stack([X, 2 * X]))


LOSSES = {  # a loss and its scale -> what value_and_grad gets: whether it is warned of
    "times the scale": (lambda loss, scale: loss * scale, True),
    "in half, the scale first": (lambda loss, scale: -(scale * (0.5 * loss)), True),
    "as it is": (lambda loss, scale: loss, False),
    "squared many times": (lambda loss, scale: functools.reduce(lambda x, _: x * x, range(64), loss), False),
    "beside the logged scale": (lambda loss, scale: loss + 0 * jax.lax.stop_gradient(jnp.log2(scale)), False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("policy", "accumulate"), [("fp16", 1), ("fp16-mixed", 1), (None, 1), ("fp16", 2)])
def test_a_loss_that_was_scaled_by_hand(name, policy, accumulate):
    change, is_told = LOSSES[name]
    tx = mixed()

    def step(params, state):
        def scaled(params, x):
            return change(loss_fn(params, x), scale_of(state))

        _, grads = jaxmp.value_and_grad(scaled, policy=policy, accumulate=accumulate)(params, X, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    told = pytest.warns(jaxmp.UnreadLossScale, match="a loss is scaled once") if is_told else contextlib.nullcontext()
    with fresh_process(), told:
        trace(step, PARAMS, tx.init(PARAMS))


def test_unscaled_gradients_for_an_update_that_does_not_unscale():
    tx = mixed()

    def step(params, state):
        _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, X, opt_state=state)
        grads = clipped_by_optax(jaxmp.unscale(grads, state))
        return jaxmp.apply_gradients(tx, grads, state, params, loss_scale=jnp.float32(1.0))

    with fresh_process():
        trace(step, PARAMS, tx.init(PARAMS))


@pytest.mark.parametrize(
    ("before", "is_named"),
    [(optax.clip_by_global_norm(1.0), True), (jaxmp.reduce_gradients(None), False), (optax.scale(0.5), False)],
    ids=["clip", "mean", "factor"],
)
def test_what_comes_before_is_proportional(before, is_named):
    tx = mixed(before=before)

    def step(params, state):
        _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, X, opt_state=state)
        return jaxmp.apply_gradients(tx, grads, state, params)

    named = pytest.warns(jaxmp.UnreadLossScale, match="before= gets scaled gradients")
    with fresh_process(), named if is_named else contextlib.nullcontext():
        trace(step, PARAMS, tx.init(PARAMS))


def test_an_update_with_gradients_as_params_is_refused():
    tx = mixed()

    def step(params, state):
        _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, X, opt_state=state)
        return tx.update(params, state, grads)

    with fresh_process(), pytest.raises(TypeError, match="got gradients as params. Swap them"):
        trace(step, PARAMS, tx.init(PARAMS))


def scaled_by_hand(params, scale):
    return jax.grad(lambda params: loss_fn(params, X) * scale)(params)


READ_BEFORE = {  # params and scale -> gradients: whether the scale is in them
    "jax.grad": (lambda params, scale: jax.grad(loss_fn)(params, X), False),
    "jax.grad in jit": (lambda params, scale: jax.jit(jax.grad(loss_fn))(params, X), False),
    "by hand": (scaled_by_hand, True),
    "by hand in jit": (lambda params, scale: jax.jit(scaled_by_hand)(params, scale), True),
    "by hand in remat": (lambda params, scale: jax.checkpoint(scaled_by_hand)(params, scale), True),
    "by a factor afterwards": (lambda p, scale: jax.tree.map(lambda g: g * scale, jax.grad(loss_fn)(p, X)), True),
}


@pytest.mark.parametrize("name", READ_BEFORE)
@pytest.mark.parametrize("in_scan", [False, True])
def test_a_scale_that_is_read_to_be_shown_scales_nothing(name, in_scan):
    gradients, is_scaled = READ_BEFORE[name]
    tx = mixed()

    def step(carry, _=None):
        params, state = carry
        scale = jaxmp.get_loss_scale(state)
        return jaxmp.apply_gradients(tx, gradients(params, scale), state, params), scale

    def run(params, state):
        return jax.lax.scan(step, (params, state), length=2) if in_scan else step((params, state))

    named = pytest.warns(jaxmp.UnreadLossScale, match="a loss scale that no loss used cannot have multiplied")
    with fresh_process(), contextlib.nullcontext() if is_scaled else named:
        trace(run, PARAMS, tx.init(PARAMS))


DIVIDED = {  # gradients that are scaled by hand, and their scale -> what the update gets: whether it is scaled
    "divided": (lambda g, c: g / c, False),
    "divided in jit": (jax.jit(lambda g, c: g / c), False),
    "divided and clipped": (lambda g, c: jnp.clip(g / c, -1, 1), False),
    "clipped and scaled again": (lambda g, c: jnp.clip(g / c, -1, 1) * c, True),
    "with noise": (lambda g, c: g + c * jax.random.normal(jax.random.key(0), g.shape), True),
}


@pytest.mark.parametrize("name", DIVIDED)
@pytest.mark.parametrize("by", [loss_fn, lambda params, x: jnp.tanh(loss_fn(params, x))], ids=["linear", "tanh"])
def test_a_loss_that_is_scaled_by_hand_is_unscaled_by_the_update(name, by):
    change, is_scaled = DIVIDED[name]
    tx = mixed()

    def step(params, state, x):
        scale = jaxmp.get_loss_scale(state)
        grads = jax.grad(lambda params: by(params, x) * scale)(params)
        return jaxmp.apply_gradients(tx, jax.tree.map(lambda g: change(g, scale), grads), state, params)

    named = pytest.warns(jaxmp.UnreadLossScale, match="gradients that were divided by the loss scale before")
    with fresh_process(), contextlib.nullcontext() if is_scaled else named:
        trace(step, PARAMS, tx.init(PARAMS), X)


def test_a_scale_that_is_read_after_its_update_speaks_for_no_other():
    tx = mixed()

    def right(params, state):
        grads = scaled_by_hand(params, jaxmp.get_loss_scale(state))
        return jaxmp.apply_gradients(tx, grads, state, params), jaxmp.get_loss_scale(state)

    def wrong(params, state):
        return jaxmp.apply_gradients(tx, jax.grad(loss_fn)(params, X), state, params)

    with fresh_process():
        trace(right, PARAMS, tx.init(PARAMS))
        with pytest.warns(jaxmp.UnreadLossScale, match="nobody read"):
            trace(wrong, PARAMS, tx.init(PARAMS))
