"""A forgotten `jaxmp.value_and_grad` is warned of while the step is traced, and nothing else is."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxmp
from policy_steps import nothing_read
from regimes import mesh_of

X = np.ones((4, 2), np.float32)
POLICY = jaxmp.get_policy("fp16")
PARAMS = {"w": np.ones((2, 3), np.float16)}
NOBODY, TWICE = "nobody read cannot have multiplied", "got the scale that an earlier update in this trace made"
ANOTHER = "got the opt_state of value_and_grad, and another opt_state of the update"
CLIPPED, ADDED = "must not be clipped or normalized", "added to what is not scaled"
DIVIDED = "divided by the loss scale before"


@contextlib.contextmanager
def process_that_says(message):
    """As `nothing_read`; `message` is warned of, or nothing is where it is None."""
    with nothing_read(), pytest.warns(jaxmp.UnreadLossScale, match=message) if message else contextlib.nullcontext():
        yield


def loss_fn(params, x):
    return jnp.mean((x.astype(params["w"].dtype) @ params["w"]).astype(jnp.float32) ** 2)


def mixed(**kwargs):
    return jaxmp.mixed_precision(optax.sgd(0.1), POLICY, **kwargs)


TX = mixed()
STATE = TX.init({"w": np.ones((2, 3), np.float32)})


def forgotten(params, state, x):
    _, grads = jax.value_and_grad(loss_fn)(params, x)
    return jaxmp.apply_gradients(TX, grads, state, params)


def changed(change, tx=TX, **options):
    """A step that puts the gradients of `value_and_grad` through `change(grads, state, params)`."""

    def step(params, state, x):
        _, grads = jaxmp.value_and_grad(loss_fn, **options)(params, x, opt_state=state)
        return jaxmp.apply_gradients(tx, change(grads, state, params), state, params)

    return step


right = changed(lambda g, s, p: g)


def leafwise(f):
    """`f(gradient)` of each leaf, as a change."""
    return lambda g, s, p: jax.tree.map(f, g)


def trace(step, *args):
    return jax.eval_shape(jax.jit(lambda *args: step(*args)), *args)  # a new function: it is traced anew


def by_hand(params, state, x):
    scale = jaxmp.get_loss_scale(state)
    grads = jax.grad(lambda p: loss_fn(p, x) * scale)(params)
    return jaxmp.apply_gradients(TX, grads, state, params)


def test_a_forgotten_value_and_grad_is_warned_of_in_each_step():
    """Also where another step of the same params is right, and where the scale is read to be shown."""

    def shown(params, state, x):
        params, state = forgotten(params, state, x)
        return params, state, jaxmp.get_loss_scale(state)

    with nothing_read():
        jaxmp.get_loss_scale(STATE)
        trace(right, PARAMS, STATE, X)
        for step in (forgotten, forgotten, shown):
            with pytest.warns(jaxmp.UnreadLossScale, match=f"{NOBODY}.*in place of jax.value_and_grad"):
                trace(step, PARAMS, STATE, X)
        trace(right, PARAMS, STATE, X)
    with process_that_says(NOBODY):
        state = jaxmp.linen.TrainState.create(apply_fn=None, params={"w": jnp.ones((2, 3))}, tx=TX, policy=POLICY)
        trace(lambda s: s.apply_gradients(grads=jax.grad(loss_fn)(s.params, X)), state)


def test_a_static_scale_is_asked_for_too():
    """One scale for all: gradients of another state with a static scale are right; and by a scale of 1 so are all."""
    static, one = mixed(loss_scale=1024.0), mixed(loss_scale=1.0)
    forgotten = lambda tx: lambda p, s, x: jaxmp.apply_gradients(tx, jax.grad(loss_fn)(p, x), s, p)  # noqa: E731

    def of_another(params, state, other, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=other)
        grads = jax.tree.map(lambda g: (g + g) / 2, grads)
        return jaxmp.apply_gradients(static, grads, state, params)

    with process_that_says(NOBODY):
        trace(forgotten(static), PARAMS, static.init(PARAMS), X)
    shared = jaxmp.shared_loss_scale(1024.0)
    with process_that_says(NOBODY):
        trace(
            lambda p, s, x, h: shared.apply_gradients(static, jax.grad(loss_fn)(p, x), s, p, h),
            *(PARAMS, static.init(PARAMS), X, shared.init()),
        )
    with nothing_read():
        trace(changed(lambda g, s, p: g, static), PARAMS, static.init(PARAMS), X)
        trace(of_another, PARAMS, static.init(PARAMS), static.init(PARAMS), X)
        trace(forgotten(one), PARAMS, one.init(PARAMS), X)


@pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])
def test_scaled_gradients_and_an_optimizer_without_a_scale(jitted):
    plain, wide = optax.sgd(0.1), {"w": jnp.ones((2, 3))}

    def step(params, state, plain_state, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
        return jaxmp.apply_gradients(plain, grads, plain_state, params)

    run = functools.partial(trace, step) if jitted else step
    with process_that_says("an optimizer that has none"):
        run(wide, TX.init(wide), plain.init(wide), X)
    if not jitted:  # in a trace nobody knows that the scale is 1
        with nothing_read():
            run(wide, jaxmp.mixed_precision(optax.sgd(0.1), "fp32").init(wide), plain.init(wide), X)


def scan_of_steps(params, state, x):
    return jax.lax.scan(lambda carry, x: (right(*carry, x), None), (params, state), jnp.stack([x, x]))[0]


def two_steps(params, state, x):
    return right(*right(params, state, x), x)


def two_losses(params, state, x):
    parts = [jaxmp.value_and_grad(loss_fn)(params, x * i, opt_state=state)[1] for i in (1, 2)]
    return jaxmp.apply_gradients(TX, jax.tree.map(jnp.add, *parts), state, params)


def branches(params, state, x):
    """The gradients are closed over, the state is passed: one state, and two names for its scale."""
    _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
    update = lambda p, s: jaxmp.apply_gradients(TX, grads, s, p)  # noqa: E731
    return jax.lax.cond(jnp.sum(x) > 0, update, lambda p, s: (p, s), params, state)


def inner_jit(params, state, x):
    grads = jax.jit(lambda p, s: jaxmp.value_and_grad(loss_fn)(p, x, opt_state=s)[1])(params, state)
    return jax.jit(lambda g, s, p: jaxmp.apply_gradients(TX, g, s, p))(grads, state, params)


def unscaled_for_an_update_that_does_not_unscale(params, state, x):
    _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, x, opt_state=state)
    grads = clipped_by_optax(jaxmp.unscale(grads, state))
    return jaxmp.apply_gradients(TX, grads, state, params, loss_scale=jnp.float32(1.0))


def averaged(params, state, x):
    return jax.pmap(lambda x: right(params, state, x), axis_name="data")(x[:2, None])


RIGHT = [right, scan_of_steps, two_steps, by_hand, changed(lambda g, s, p: g, accumulate=2), two_losses, branches,
         inner_jit, unscaled_for_an_update_that_does_not_unscale, averaged]  # fmt: skip


@pytest.mark.parametrize("step", RIGHT, ids=lambda step: step.__name__)
def test_scales_that_were_read(step):
    with nothing_read():
        trace(step, PARAMS, STATE, X)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("step", [two_steps, branches, inner_jit, averaged], ids=lambda step: step.__name__)
def test_scales_that_were_read_without_jit(step):
    """Twice from one state, as a comparison takes its steps."""
    with nothing_read():
        for _ in range(2):
            step(PARAMS, STATE, X)


def test_gradients_of_another_program():
    """Of a jitted function of their own, of an earlier call, and outside of jit."""
    with nothing_read():
        grads = jax.jit(lambda p, s: jaxmp.value_and_grad(loss_fn)(p, X, opt_state=s)[1])(PARAMS, STATE)
        trace(lambda g, s, p: jaxmp.apply_gradients(TX, g, s, p), grads, STATE, PARAMS)
    with nothing_read():  # nothing is traced
        TX.update(PARAMS, STATE, PARAMS)
    with nothing_read():
        shared = jaxmp.shared_loss_scale()
        jaxmp.get_loss_scale(shared.init())
        trace(lambda g, s, p, h: shared.apply_gradients(TX, g, s, p, h), grads, STATE, PARAMS, shared.init())
    with nothing_read():  # a plain number is known without reading
        static = mixed(loss_scale=4.0)
        trace(static.update, grads, static.init(PARAMS), PARAMS)
        none = jaxmp.mixed_precision(optax.sgd(0.1), "bf16")
        bf16 = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
        trace(none.update, bf16, none.init(bf16), bf16)


def test_the_same_gradients_twice_are_warned_of():
    """The second update divides by a scale that the first has made."""

    def step_with(change):
        def step(params, state, x):
            _, grads = jaxmp.value_and_grad(loss_fn)(params, x, opt_state=state)
            params, state = jaxmp.apply_gradients(TX, grads, state, params)
            return jaxmp.apply_gradients(TX, change(grads), state, params)

        return step

    with process_that_says(ANOTHER):
        trace(step_with(lambda grads: grads), PARAMS, STATE, X)
    with process_that_says(TWICE):
        trace(step_with(lambda grads: jax.tree.map(jnp.negative, grads)), PARAMS, STATE, X)


@pytest.mark.parametrize("how", ["argument", "closed over", "eager", "update", "in a scan", "nnx"])
def test_a_stale_opt_state_is_warned_of(how):
    first, state = STATE, TX.init(PARAMS)

    def step(params, state, old):
        _, grads = jaxmp.value_and_grad(loss_fn)(params, X, opt_state=old)
        if how == "update":
            return TX.update(grads, state, params)
        return jaxmp.apply_gradients(TX, grads, state, params)

    def scan(params, state, old):
        return jax.lax.scan(lambda carry, _: (step(*carry, old), None), (params, state), None, length=2)[0]

    with process_that_says(ANOTHER):
        if how == "nnx":
            model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
            optimizer, other = (jaxmp.nnx.Optimizer(model, TX, wrt=nnx.Param, policy=POLICY) for _ in range(2))
            loss = lambda m: jnp.mean(m(X.astype(np.float16)).astype(jnp.float32))  # noqa: E731
            optimizer.update(model, jaxmp.nnx.value_and_grad(loss)(model, opt_state=other.opt_state)[1])
        elif how == "eager":
            step(PARAMS, state, first)
        elif how == "closed over":
            trace(lambda p, s: step(p, s, first), PARAMS, state)
        else:
            trace(scan if how == "in a scan" else step, PARAMS, state, first)


def test_two_optimizers_with_a_scale_each():
    """One model's gradients come from outside, the other's are computed here."""

    def step(params, state, other_state, other_grads, x):
        return right(params, state, x), jaxmp.apply_gradients(TX, other_grads, other_state, params)

    with nothing_read():
        trace(step, PARAMS, STATE, TX.init(PARAMS), PARAMS, X)


def test_in_nnx_and_with_a_grad_scaler():
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = jaxmp.nnx.Optimizer(model, TX, wrt=nnx.Param, policy=POLICY)

    @nnx.jit
    def step(model, optimizer, x):
        loss, grads = jaxmp.nnx.value_and_grad(lambda m, x: jnp.mean(m(x)), policy=POLICY)(
            model, x, opt_state=optimizer.opt_state
        )
        optimizer.update(model, grads)
        return loss

    with nothing_read():
        step(model, optimizer, X)
        step(model, optimizer, X[:2])
    with nothing_read():
        with_scaler = lambda params, scaler, x: jax.grad(lambda p: scaler.scale(loss_fn(p, x)))(params)  # noqa: E731
        trace(with_scaler, PARAMS, jaxmp.GradScaler(), X)
        trace(lambda g, s, p: TX.update(jax.tree.map(jnp.negative, g), s, p), PARAMS, STATE, PARAMS)


# Gradients that were changed between value_and_grad and the update


def clipped(grads):
    return jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / optax.tree.norm(grads)), grads)


def clipped_by_optax(grads):
    return optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0]


def noise_like(g):
    return 0.1 * jax.random.normal(jax.random.key(0), g.shape, g.dtype)


scale_of = jaxmp.get_loss_scale

CHANGES = {  # gradients, state and params -> what the update gets: what is said of it
    "clipped by hand": (lambda g, s, p: clipped(g), CLIPPED),
    "clipped by optax": (lambda g, s, p: clipped_by_optax(g), CLIPPED),
    "clipped by elements, jitted": (leafwise(jax.jit(lambda x: jnp.clip(x, -1, 1))), CLIPPED),
    "normalized": (leafwise(lambda x: x / jnp.max(jnp.abs(x))), CLIPPED),
    "squared": (leafwise(jnp.square), CLIPPED),
    "averaged": (leafwise(lambda x: jax.lax.pmean(x, "data")), None),
    "cast": (leafwise(lambda x: x.astype(jnp.float32) * 0.5), None),
    "added up": (leafwise(lambda x: sum([jnp.zeros_like(x), x, x]) / 2), None),
    "moved in a jitted function": (leafwise(jax.jit(lambda x: -x.reshape(-1)[::-1].reshape(x.shape))), None),
    "finite ones": (leafwise(lambda x: jnp.where(jnp.isfinite(x), x, 0)), None),
    "in a loop, which is not known": (leafwise(lambda g: jax.lax.fori_loop(0, 2, lambda _, x: jnp.tanh(x), g)), None),
    "masked": (leafwise(lambda x: x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape)), None),
    "unscaled and clipped": (lambda g, s, p: clipped_by_optax(jaxmp.unscale(g, s)), DIVIDED),
    "unscaled, times 1": (lambda g, s, p: jax.tree.map(lambda x: x * 1.0, jaxmp.unscale(g, s)), "jaxmp.unscale"),
    "unscaled by hand": (lambda g, s, p: jax.tree.map(lambda x: x / scale_of(s), g), DIVIDED),
    "by its inverse": (lambda g, s, p: jax.tree.map(lambda x: x * (1 / scale_of(s)), g), "divided by the loss scale"),
    "scaled twice": (lambda g, s, p: jax.tree.map(lambda x: x * scale_of(s), g), "the loss scale multiplied again"),
    "clipped by hand in between": (
        lambda g, s, p: jax.tree.map(lambda x: jnp.clip(x / scale_of(s), -1, 1) * scale_of(s), g),
        None,
    ),
    "scaled again": (
        lambda g, s, p: jax.tree.map(lambda x: x * scale_of(s), clipped_by_optax(jaxmp.unscale(g, s))),
        None,
    ),
    "by a ratio": (
        lambda g, s, p: jax.tree.map(lambda x: x * jnp.minimum(1, 1 / optax.tree.norm(jaxmp.unscale(g, s))), g),
        None,
    ),
    "where params are": (lambda g, s, p: jax.tree.map(lambda g, p: jnp.where(p > 0, g, 0), g, p), None),
    "with weight decay": (lambda g, s, p: jax.tree.map(lambda g, p: g + 0.1 * p, g, p), ADDED),
    "with scaled decay": (lambda g, s, p: jax.tree.map(lambda g, p: g + 0.1 * p * scale_of(s), g, p), None),
    "with noise": (leafwise(lambda g: g + noise_like(g)), ADDED),
    "with scaled noise": (lambda g, s, p: jax.tree.map(lambda g: g + scale_of(s) * noise_like(g), g), None),
    "with a pull to other params": (lambda g, s, p: jax.tree.map(lambda g, p: g + 0.1 * (p - 2), g, p), ADDED),
    "with another loss": (lambda g, s, p: jax.tree.map(jnp.add, g, jax.grad(loss_fn)(p, X)), ADDED),
    "with another loss, scaled": (
        lambda g, s, p: jax.tree.map(jnp.add, g, jax.grad(lambda p: loss_fn(p, X) * scale_of(s))(p)),
        None,
    ),
    "with zeros": (leafwise(lambda g: g + np.zeros(g.shape, g.dtype)), None),
}
STATIC = ["clipped by hand", "unscaled by hand", "scaled twice", "with noise", "scaled again", "averaged"]
CASES = [("auto", name) for name in CHANGES] + [(1024.0, name) for name in STATIC]


@pytest.mark.thorough(12)
@pytest.mark.parametrize(("loss_scale", "name"), CASES, ids=lambda x: str(x).replace("auto", "dynamic"))
def test_gradients_that_were_changed_before_the_update(loss_scale, name):
    change, message = CHANGES[name]
    tx = mixed(loss_scale=loss_scale)
    run = jax.shard_map(
        changed(change, tx), mesh=mesh_of(devices=1), in_specs=(P(), P(), P("data")), out_specs=P(), check_vma=False
    )
    with process_that_says(message):
        trace(run, PARAMS, tx.init(PARAMS), X)


def test_without_a_scale_gradients_may_be_clipped():
    tx, bf16 = jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), {"w": PARAMS["w"].astype(jnp.bfloat16)}
    with nothing_read():
        trace(changed(lambda g, s, p: clipped(g), tx), bf16, tx.init(bf16), X)


QUOTIENTS = {  # of a gradient and a norm: whether it is a clip, or only keeps a quotient from 0 / 0
    "an addend": (lambda g, n: g / (n + 1e-8) * n, False),
    "a floor": (lambda g, n: g / jnp.maximum(n, 1e-12) * n, False),
    "a ratio within bounds": (lambda g, n: g * jnp.clip(n / (2 * n + 1e-4), 0, 2), False),
    "a projection": (lambda g, n: g - jnp.vdot(g, g) / (jnp.vdot(g, g) + 1e-8) * g / 2, False),
    "one in place of zero": (lambda g, n: g / jnp.where(n == 0, 1.0, n) * n, False),
    "one in place of zero, the other way": (lambda g, n: g / jnp.where(n > 0, n, 1.0) * n, False),
    "one in place of what is small": (lambda g, n: g / jnp.where(n < 1e-6, 1.0, n) * n, False),
    "zero from the left": (lambda g, n: g / jnp.where(0 < n, n, 1.0) * n, False),
    "steps of 8 bits": (lambda g, n: jnp.round(g / jnp.where(n == 0, 1.0, n / 127)) * (n / 127), False),
    "a large addend": (lambda g, n: g / (n + 1.0), True),
    "an upper bound": (lambda g, n: jnp.minimum(g, 1e-5), True),
    "a bound": (lambda g, n: g / jnp.where(n < 1.0, 1.0, n), True),
    "what is not scaled, by a mask": (lambda g, n: jnp.where(jnp.arange(3)[None] > 0, g, 0.5), True),
    "a choice by sign": (lambda g, n: jnp.where(g < 0, 0.5, g), True),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_what_keeps_a_quotient_from_zero_is_no_clip(name):
    of_leaf, is_clip = QUOTIENTS[name]

    def change(grads, state, params):
        g = grads["w"].astype(jnp.float32)
        return {"w": of_leaf(g, jnp.sqrt(jnp.sum(g**2)))}

    for way in (change, jax.jit(change)):
        with process_that_says("must not be clipped" if is_clip else None):
            trace(changed(way), PARAMS, STATE, X)


@pytest.mark.parametrize("key", [jax.random.key(0), jax.random.PRNGKey(0)], ids=["typed", "raw"])
def test_a_key_and_a_step_hold_no_scale(key):
    noisy = lambda g, key, i: g + jnp.cos(i) * jax.random.normal(key, g.shape, g.dtype)  # noqa: E731
    damped = lambda g, key, i: g * jnp.exp(-0.1 * i) * jax.random.bernoulli(key, 0.5, g.shape)  # noqa: E731
    for change, message in ((noisy, "added to what"), (damped, None)):

        def step(params, state, x, key, i, change=change):
            return changed(leafwise(lambda g: change(g, key, i)))(params, state, x)

        with process_that_says(message):
            trace(step, PARAMS, STATE, X, key, jnp.int32(3))


def test_gradients_of_a_former_step_may_be_added():
    def step(params, state, x, total):
        return changed(lambda g, s, p: jax.tree.map(jnp.add, g, total))(params, state, x)

    with nothing_read():
        trace(step, PARAMS, STATE, X, PARAMS)


@pytest.mark.parametrize("is_clipped", [True, False])
def test_gradients_of_single_rows_are_clipped_after_the_update_unscales(is_clipped):
    def step(params, state, xs):
        def of_row(x):
            _, grads = jaxmp.value_and_grad(loss_fn, policy=POLICY)(params, x, opt_state=state)
            return clipped(grads) if is_clipped else grads

        grads = jax.tree.map(lambda g: jnp.mean(g, 0), jax.vmap(of_row)(xs))
        return jaxmp.apply_gradients(TX, grads, state, params)

    with process_that_says("must not be clipped" if is_clipped else None):
        trace(step, PARAMS, STATE, np.stack([X, 2 * X]))


@pytest.mark.parametrize(
    ("before", "message"),
    [
        (optax.clip_by_global_norm(1.0), "before= gets scaled gradients"),
        (jaxmp.reduce_gradients(None), None),
        (optax.scale(0.5), None),
    ],
    ids=["clip", "mean", "factor"],
)
def test_what_comes_before_is_proportional(before, message):
    tx = mixed(before=before)
    with process_that_says(message):
        trace(changed(lambda g, s, p: g, tx), PARAMS, tx.init(PARAMS), X)


# Losses that were scaled by hand

LOSSES = {  # a loss and its scale -> what value_and_grad gets: whether it is scaled twice
    "times the scale": (lambda loss, scale: loss * scale, True),
    "in half, the scale first": (lambda loss, scale: -(scale * (0.5 * loss)), True),
    "as it is": (lambda loss, scale: loss, False),
    "squared many times": (lambda loss, scale: functools.reduce(lambda x, _: x * x, range(64), loss), False),
    "beside the logged scale": (lambda loss, scale: loss + 0 * jax.lax.stop_gradient(jnp.log2(scale)), False),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize(("policy", "accumulate"), [("fp16-mixed", 1), (None, 1), ("fp16", 2)])
def test_a_loss_that_was_scaled_by_hand(name, policy, accumulate):
    change, is_scaled = LOSSES[name]

    def step(params, state):
        scaled = lambda params, x: change(loss_fn(params, x), scale_of(state))  # noqa: E731
        _, grads = jaxmp.value_and_grad(scaled, policy=policy, accumulate=accumulate)(params, X, opt_state=state)
        return jaxmp.apply_gradients(TX, grads, state, params)

    with process_that_says("a loss is scaled once" if is_scaled else None):
        trace(step, PARAMS, STATE)


def scaled_by_hand(params, scale):
    return jax.grad(lambda params: loss_fn(params, X) * scale)(params)


READ_BEFORE = {  # params and scale -> gradients: whether the scale is in them
    "jax.grad": (lambda params, scale: jax.grad(loss_fn)(params, X), False),
    "jax.grad in jit": (lambda params, scale: jax.jit(jax.grad(loss_fn))(params, X), False),
    "by hand": (scaled_by_hand, True),
    "by hand in jit": (jax.jit(scaled_by_hand), True),
    "by hand in remat": (lambda params, scale: jax.checkpoint(scaled_by_hand)(params, scale), True),
    "by a factor afterwards": (lambda p, scale: jax.tree.map(lambda g: g * scale, jax.grad(loss_fn)(p, X)), True),
    "without a loss": (lambda p, scale: jax.tree.map(lambda p: jnp.full_like(p, 3.0) / jnp.sqrt(2.0), p), True),
}


@pytest.mark.parametrize("name", READ_BEFORE)
@pytest.mark.parametrize("in_scan", [False, True])
def test_a_scale_that_is_read_to_be_shown_scales_nothing(name, in_scan):
    gradients, is_scaled = READ_BEFORE[name]

    def step(carry, _=None):
        params, state = carry
        scale = jaxmp.get_loss_scale(state)
        return jaxmp.apply_gradients(TX, gradients(params, scale), state, params), scale

    def run(params, state):
        return jax.lax.scan(step, (params, state), length=2) if in_scan else step((params, state))

    with process_that_says(None if is_scaled else "a loss scale that no loss used cannot have multiplied"):
        trace(run, PARAMS, STATE)


SCALED_BY_HAND = {  # gradients that are scaled by hand, and their scale -> what the update gets: whether it is scaled
    "divided": (lambda g, c: g / c, False),
    "divided in jit": (jax.jit(lambda g, c: g / c), False),
    "divided and clipped": (lambda g, c: jnp.clip(g / c, -1, 1), False),
    "clipped and scaled again": (lambda g, c: jnp.clip(g / c, -1, 1) * c, True),
    "with noise": (lambda g, c: g + c * jax.random.normal(jax.random.key(0), g.shape), True),
}


@pytest.mark.parametrize("name", SCALED_BY_HAND)
@pytest.mark.parametrize("by", [loss_fn, lambda params, x: jnp.tanh(loss_fn(params, x))], ids=["linear", "tanh"])
def test_a_loss_that_is_scaled_by_hand_is_unscaled_by_the_update(name, by):
    change, is_scaled = SCALED_BY_HAND[name]

    def step(params, state, x):
        scale = jaxmp.get_loss_scale(state)
        grads = jax.grad(lambda params: by(params, x) * scale)(params)
        return jaxmp.apply_gradients(TX, jax.tree.map(lambda g: change(g, scale), grads), state, params)

    with process_that_says(None if is_scaled else f"gradients that were {DIVIDED}"):
        trace(step, PARAMS, STATE, X)


def test_a_scale_that_is_read_after_its_update_speaks_for_no_other():
    def shown(params, state, x):
        return by_hand(params, state, x), jaxmp.get_loss_scale(state)

    with nothing_read():
        trace(shown, PARAMS, STATE, X)
        with pytest.warns(jaxmp.UnreadLossScale, match="nobody read"):
            trace(forgotten, PARAMS, STATE, X)
