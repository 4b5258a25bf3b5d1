"""Gradients of a scaled loss: what comes back, under which transforms, on which device, and what is refused.

Numbers are small integers and powers of two wherever that makes every result exact.
"""

import contextlib
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_close, assert_exact, assert_moved
from jaxmp._src.step import microbatches
from regimes import AXIS, mesh_of

F16, F32 = np.float16, np.float32
SCALE = 2.0**10


def state_with(scale):
    """An optimizer's state that holds this loss scale."""
    return jaxmp.unscale_and_skip(optax.identity(), scale).init(())


def params16():
    return {"w": jnp.array([1.0, -2.0], F16), "gain": jnp.array(0.5, F32)}


def loss_fn(params, x):  # x [batch, 2]
    y = (x.astype(F16) @ params["w"]).astype(F32) * params["gain"]  # [batch]
    return jnp.mean(y)


X = np.array([[1, 2], [3, -4], [5, 6], [-7, 8]], F32)
MEAN_X = X.mean(0)  # [0.5, 3]
LOSS = F32(0.5 * (0.5 - 6.0))
GRADS = {"w": 0.5 * MEAN_X, "gain": F32(0.5 - 6.0)}  # unscaled


def scaled(grads, accumulate=1):
    """Times SCALE, in the dtypes in which `value_and_grad` returns them."""
    dtypes = {"w": F16 if accumulate == 1 else F32, "gain": F32}
    return {name: np.asarray(grads[name] * SCALE, dtypes[name]) for name in grads}


# What comes back


def test_loss_is_unscaled_float32_and_grads_are_scaled_in_the_dtypes_of_the_params():
    loss, grads = jaxmp.value_and_grad(loss_fn)(params16(), X, opt_state=state_with(SCALE))
    assert_exact(loss, LOSS)
    assert_exact(grads, scaled(GRADS))


@pytest.mark.parametrize("scale", [3.0, 2.0**100])
def test_loss_is_exact_whatever_the_scale(scale):
    """Never scaled and divided back: 0.1 * 3 / 3 is not 0.1, and 2^100 * 2^100 is inf."""
    x = np.array([0.1, 2.0**90], F32)
    f = jaxmp.value_and_grad(lambda x, b: jnp.sum(x) + 0 * jnp.sum(b), accumulate=2 if scale == 3 else 1)
    loss, grads = jax.jit(f)(x, np.ones(2, F32), opt_state=state_with(scale))
    assert_exact(loss, np.sum(x))
    assert_close(grads, np.full(2, scale, F32), rtol=2e-7)


def test_a_float16_loss_is_warned_of_and_overflows_at_65536():
    w = jnp.array(2.0**-10, F16)
    with pytest.warns(
        UserWarning, match="float16.*a scale above 65504 overflows in every step. Compute the loss in float32"
    ):
        loss, grads = jaxmp.value_and_grad(lambda w: w * 1)(w, opt_state=state_with(2.0**16))
    assert_exact((loss, grads), (F32(2.0**-10), F16(np.inf)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss, _ = jaxmp.value_and_grad(lambda w: (w * 1).astype(jnp.bfloat16))(w, opt_state=state_with(2.0**16))
        assert_exact(loss, F32(2.0**-10))


@pytest.mark.parametrize("accumulate", [1, 2])
def test_aux(accumulate):
    def with_aux(params, x):
        return loss_fn(params, x), {"rows": x[:, 0], "n": jnp.int32(x.shape[0])}

    f = jax.jit(jaxmp.value_and_grad(with_aux, has_aux=True, accumulate=accumulate))
    (loss, aux), grads = f(params16(), X, opt_state=state_with(SCALE))
    assert_exact(loss, LOSS)
    assert_exact(grads, scaled(GRADS, accumulate))
    if accumulate == 1:
        assert_moved(aux, {"rows": X[:, 0], "n": np.int32(4)})
    else:  # stacked, one entry per microbatch
        assert_moved(aux, {"rows": X[:, 0].reshape(2, 2), "n": np.array([2, 2], np.int32)})


@pytest.mark.parametrize("argnums", [-1, (1, 0), [0, -1]], ids=str)
def test_argnums(argnums):
    a, b = np.array([1.0, 2.0], F16), np.array([3.0, 4.0], F32)
    loss, grads = jaxmp.value_and_grad(lambda a, b: jnp.sum(a * b), argnums)(a, b, opt_state=state_with(2.0))
    expected = {0: np.array([6.0, 8.0], F16), 1: np.array([2.0, 4.0], F32)}
    assert_exact(loss, F32(11.0))
    assert_exact(grads, expected[1] if argnums == -1 else tuple(expected[i % 2] for i in argnums))


def test_keyword_arguments_are_passed_on_whole():
    seen = []

    def f(w, x, *, table, train):
        seen.append((table.shape, train))
        return jnp.mean(x * w) + jnp.sum(table)

    x, w, table = np.arange(4, dtype=F32), np.array(2.0, F32), np.ones(3, F32)
    loss_and_grads = jaxmp.value_and_grad(f, accumulate=2)(w, x, table=table, train=True, opt_state=state_with(2.0))
    assert_exact(loss_and_grads, (F32(6.0), F32(3.0)))
    assert set(seen) == {((3,), True)}


# Accumulation


def mean_of_products(w, x):
    return jnp.mean((x * w).astype(F32))


def test_sums_of_microbatches_are_float32():
    """Four times 32768 is inf in float16, where optax.MultiSteps keeps the sum of float16 gradients."""
    w, x = np.array([1.0], F16), np.full(4, 2.0**15, F16)
    tx = jaxmp.mixed_precision(optax.sgd(2.0**-15), "fp16", loss_scale=4.0)

    @jax.jit
    def step(w, opt_state):
        loss, grads = jaxmp.value_and_grad(mean_of_products, accumulate=4)(w, x, opt_state=opt_state)
        _, whole = jaxmp.value_and_grad(mean_of_products)(w, x, opt_state=opt_state)
        new, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, w)
        return loss, grads, whole, new, opt_state.skipped

    loss, grads, whole, new, skipped = step(w, tx.init(np.array([1.0], F32)))
    assert_exact((loss, grads), (F32(2.0**15), np.array([2.0**17], F32)))
    assert_exact(whole, np.array([np.inf], F16))  # the gradient of the whole batch overflows float16
    assert_exact((new, skipped), (np.array([0.0], F16), np.bool_(False)))


def test_accumulate_argnums_name_the_batch():
    """batch_stats of length 3 stand beside a batch of 4, and are passed on whole."""

    def f(w, batch_stats, batch):
        return jnp.mean(batch["x"] * w) + jnp.sum(batch_stats["mean"]) * 0, batch_stats["mean"]

    def run(named, length=3):
        compute = jaxmp.value_and_grad(f, has_aux=True, accumulate=2, accumulate_argnums=named)
        args = jnp.array(1.0), {"mean": np.ones(length, F32)}, {"x": np.arange(4, dtype=F32)}
        return compute(*args, opt_state=state_with(2.0))

    for named in (-1, (2,)):
        (loss, aux), grads = run(named)
        assert_exact((loss, grads, aux), (F32(1.5), F32(3.0), np.ones((2, 3), F32)))
    with pytest.raises(
        ValueError, match="accumulate=2 must divide the leading axis.*Name the arguments to cut: accumulate_argnums="
    ):
        run((1, 2))
    with pytest.raises(
        ValueError, match="same leading axis; got 6 at argument 1/mean, 4 at argument 2/x. Name the arg"
    ):
        run((1, 2), length=6)


# Under other transforms


def under_scan(f, params, x, opt_state):
    def body(carry, x):
        return carry, f(carry, x, opt_state=opt_state)

    _, out = jax.lax.scan(body, params, np.stack([x, x]))
    return jax.tree.map(lambda x: x[1], out)


def under_vmap(f, params, x, opt_state):
    out = jax.vmap(lambda x: f(params, x, opt_state=opt_state))(np.stack([x * 0, x]))
    return jax.tree.map(lambda x: x[1], out)


def under_vmap_over_scales(f, params, x, opt_state):
    """Two states with a scale each: a population."""
    both = jax.tree.map(lambda a: jnp.stack([a, a * 2 if a.dtype == F32 else a]), opt_state)
    out = jax.vmap(lambda s: f(params, x, opt_state=s))(both)
    return jax.tree.map(lambda x: x[0], out)


def under_jit_with_remat(f, params, x, opt_state):
    return jax.jit(jax.checkpoint(f))(params, x, opt_state=opt_state)


@pytest.mark.parametrize(
    ("under", "accumulate"),
    [
        (under_jit_with_remat, 2),
        (under_scan, 1),
        (under_scan, 2),
        (under_vmap, 1),
        (under_vmap, 2),
        (under_vmap_over_scales, 1),
    ],
)
def test_transforms(under, accumulate):
    of = jax.checkpoint(loss_fn) if under is under_scan else loss_fn
    f = jaxmp.value_and_grad(of, accumulate=accumulate)
    loss, grads = under(f, params16(), X, state_with(SCALE))
    assert_exact(loss, LOSS)
    assert_exact(grads, scaled(GRADS, accumulate))


# On several devices


def on_four_devices(f, how, params, x):
    """`f(params, x)` on each device with all params and its row of `x`; results stacked, [4, ...]."""
    if how == "pmap":
        return jax.pmap(f, AXIS, in_axes=(None, 0), devices=jax.devices()[:4])(params, x)
    stacked = lambda params, x: jax.tree.map(lambda y: y[None], f(params, x[0]))  # noqa: E731
    specs = {"in_specs": (P(), P(AXIS)), "out_specs": P(AXIS)}
    return jax.jit(jax.shard_map(stacked, mesh=mesh_of(), **specs, check_vma=how == "shard_map"))(params, x)


FACTORS = np.arange(1, 5, dtype=F32)
ROWS = X * FACTORS[:, None, None]  # of four devices


@pytest.mark.parametrize(
    ("how", "accumulate"), [("pmap", 1), ("shard_map", 1), ("shard_map", 2), ("shard_map_unchecked", 2)]
)
def test_gradients_are_this_device_s_own(how, accumulate):
    """Under check_vma autodiff sums the gradients of replicated params over the mesh: flax's come back times N."""
    params, opt_state = params16(), state_with(SCALE)

    def f(params, x):
        return jaxmp.value_and_grad(loss_fn, accumulate=accumulate)(params, x, opt_state=opt_state)

    loss, grads = on_four_devices(f, how, params, ROWS)
    assert_exact(loss, LOSS * FACTORS)
    expected = {"w": GRADS["w"] * FACTORS[:, None], "gain": GRADS["gain"] * FACTORS}
    assert_exact(grads, scaled(expected, accumulate))


@pytest.mark.thorough(1)
@pytest.mark.parametrize("how", ["pmap", "shard_map", "shard_map_unchecked"])
def test_no_float16_sum_over_devices_happens_before_the_user_s_own(how):
    w, x, opt_state = np.array([1.0], F16), np.full((4, 1), 2.0**13, F16), state_with(4.0)

    def loss_fn(w, x):
        return jnp.sum((w * x).astype(F32))

    def f(w, x):
        _, grads = jaxmp.value_and_grad(loss_fn)(w, x, opt_state=opt_state)
        tx = jaxmp.reduce_gradients()
        return tx.update(grads, tx.init(grads))[0]

    assert_exact(on_four_devices(f, how, w, x), np.full((4, 1), 2.0**15, F32))
    if how == "shard_map":  # what jax.grad does there: 4 * 32768 in float16
        summed = on_four_devices(lambda w, x: jax.lax.pmean(jax.grad(lambda w: 4 * loss_fn(w, x))(w), AXIS), how, w, x)
        assert np.isinf(summed).all()


@pytest.mark.thorough(3)
@pytest.mark.parametrize("joined", ["pmean", "psum"])
@pytest.mark.parametrize(
    ("how", "accumulate"), [("pmap", 1), ("shard_map", 1), ("shard_map", 2), ("shard_map_unchecked", 2)]
)
def test_a_loss_that_is_one_for_all_devices(how, accumulate, joined):
    """A mean of the gradients over devices is that of the loss in every regime, as in plain jax."""
    params, opt_state = params16(), state_with(SCALE)

    def joint(params, x):
        loss = loss_fn(params, x)
        return jax.lax.pmean(loss, AXIS) if joined == "pmean" else jax.lax.psum(loss / 4, AXIS)

    def f(params, x):
        loss, grads = jaxmp.value_and_grad(joint, accumulate=accumulate)(params, x, opt_state=opt_state)
        return loss, jax.lax.pmean(grads, AXIS)

    loss, grads = on_four_devices(f, how, params, ROWS)
    assert_exact(loss, np.full(4, LOSS * 2.5))
    expected = {"w": np.tile(GRADS["w"] * 2.5, (4, 1)), "gain": np.tile(GRADS["gain"] * 2.5, 4)}
    assert_exact(grads, scaled(expected, accumulate))


def test_the_sum_that_a_joint_loss_needs_is_in_float32():
    """Of four parts in float16, two are beyond its range together."""
    mesh, opt_state = mesh_of(), state_with(4.0)

    def f(w, x):
        loss = lambda w, x: jax.lax.pmean(jnp.sum((w * x).astype(F32)), AXIS)  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss)(w, x, opt_state=opt_state)
        return grads

    run = jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P()))
    found = run(jnp.ones(1, F16), jnp.array([2.0**15, 2.0**15, -(2.0**15), 32.0], F16))
    assert_exact(found, np.array([2.0**15 + 32], F16))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_loss_that_is_one_along_one_of_two_axes(check_vma):
    mesh = jax.make_mesh((2, 2), ("data", "sequence"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])

    def f(w, x):
        loss = lambda w: jax.lax.pmean(jnp.sum(w * x), "sequence")  # noqa: E731
        _, grads = jaxmp.value_and_grad(loss)(w, opt_state=state_with(2.0))
        tx = jaxmp.reduce_gradients()
        return tx.update({"w": grads}, tx.init(()))[0]["w"]

    spread = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data", "sequence")), out_specs=P(), check_vma=check_vma)
    assert_exact(jax.jit(spread)(jnp.array(1.0), jnp.array([[1.0, 2.0], [3.0, 4.0]])), F32(5.0))


def test_a_joint_loss_of_cut_params_is_refused():
    params = {"w": jnp.ones((8, 4)), "b": jnp.ones(4)}
    layout = jaxmp.fsdp.layout_of(params, mesh_of(), axis_name=AXIS, min_size=9)

    def f(params, x):
        whole = lambda params: jaxmp.fsdp.gather(params, layout)  # noqa: E731
        loss = lambda params, x: jax.lax.pmean(jnp.mean(x @ whole(params)["w"] + whole(params)["b"][None]), AXIS)  # noqa: E731
        return jaxmp.value_and_grad(loss)(params, x, opt_state=state_with(2.0))[1]

    run = jax.shard_map(f, mesh=mesh_of(), in_specs=(layout.specs, P(AXIS)), out_specs=layout.specs)
    with pytest.raises(ValueError, match="the loss must be that of this device's rows; .* Take its pmean after"):
        jax.jit(run)(params, jnp.ones((8, 8)))


def test_named_axes_stay_own_and_others_are_summed():
    """A tensor-parallel axis that is left out keeps the sum that autodiff makes over it."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    opt_state = state_with(2.0)

    def f(w, x):
        def loss_fn(w):  # each device of the model axis holds a part of x
            return jax.lax.psum(jnp.sum(w * x), "model")

        loss, grads = jaxmp.value_and_grad(loss_fn, axis_name="data")(w, opt_state=opt_state)
        return loss[None], grads[None]

    x = jnp.array([[1.0, 2.0], [3.0, 4.0]])
    spread = jax.shard_map(f, mesh=mesh, in_specs=(P(), P("data", "model")), out_specs=(P("data"), P("data")))
    loss, grads = jax.jit(spread)(jnp.array(1.0), x)
    assert_exact((loss, grads), (np.array([3.0, 7.0], F32), np.array([6.0, 14.0], F32)))


def test_accumulation_on_an_explicit_mesh():
    """Where shardings are part of the types, microbatches and sums keep those of the batch and of the params."""
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])

    def loss_fn(w, x):
        return jnp.mean((x.astype(F16) @ w).astype(F32))

    w = jax.device_put(jnp.ones((2, 4), F16), NamedSharding(mesh, P(None, "model")))
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    f = jax.jit(jaxmp.value_and_grad(loss_fn, accumulate=2))
    loss, grads = f(w, x, opt_state=state_with(4.0))  # the arrays name their mesh: it needs no jax.set_mesh
    assert_exact(loss, F32(3.5))
    assert_exact(grads, np.broadcast_to(MEAN_X[:, None], (2, 4)).astype(F32))
    assert grads.sharding.spec == P(None, "model")


# What is refused


def nnx_linear():
    return nnx.Linear(1, 1, rngs=nnx.Rngs(0))


def call(fn, *args, opt_state="one", **options):
    """`value_and_grad(fn)` with the state of an optimizer, if none is passed."""
    grad_fn = (jaxmp.nnx if isinstance(args[0], nnx.Module) else jaxmp).value_and_grad(fn, **options)
    return grad_fn(*args, opt_state=state_with(1.0) if isinstance(opt_state, str) else opt_state)


def of_params(leaf):
    return lambda: call(lambda params: jnp.float32(0), {"layer": {"w": leaf}, "ok": np.ones(1)})


def returning(*outputs, **options):
    """A loss that returns this."""
    return lambda: call(lambda w: outputs[0] if len(outputs) == 1 else outputs, np.ones(1, F32), **options)


def of_loss(**options):
    return lambda: call(loss_fn, params16(), X, **options)


NO_FLOAT = "params must be float; got {} at argument 0/layer/w. Pass it in another"
NO_SCALE = "must hold a loss scale; got .*. Pass opt_state=, the state of jaxmp.mixed_precision"
NO_SCALAR = "the loss must be a float scalar; got {}"
NO_AUX = r"with has_aux=True the function must return \(loss, aux\); got {}"
NOT_POSITIONAL = "argnums must name positional arguments; got {} for a call with {} of them"
REFUSED = {
    "params: int32": (of_params(np.arange(2, dtype=np.int32)), TypeError, NO_FLOAT.format("int32")),
    "params: complex": (of_params(np.array([1j], np.complex64)), TypeError, NO_FLOAT.format("complex64")),
    "params: a number": (of_params(1), TypeError, NO_FLOAT.format("int")),
    "params: a key": (lambda: of_params(jax.random.key(0))(), TypeError, NO_FLOAT.format("key<fry>")),
    "params: a module": (
        lambda: jaxmp.value_and_grad(lambda m: 0.0)(nnx_linear(), opt_state=state_with(1.0)),
        TypeError,
        "Use jaxmp.nnx.value_and_grad",
    ),
    "opt_state: of optax": (lambda: of_loss(opt_state=optax.adam(1.0).init(np.ones(1)))(), ValueError, NO_SCALE),
    "opt_state: empty": (of_loss(opt_state={}), ValueError, NO_SCALE),
    "opt_state: None": (of_loss(opt_state=None), ValueError, NO_SCALE),
    "opt_state: two scales": (
        lambda: of_loss(opt_state=(state_with(2.0), state_with(2.0)))(),
        ValueError,
        "opt_state must hold one loss scale; got 2",
    ),
    "loss: a vector": (
        returning(np.ones(2, F32)),
        TypeError,
        NO_SCALAR.format(r"float32\[2\]. Reduce it with jnp.mean"),
    ),
    "loss: int": (returning(np.int32(1)), TypeError, NO_SCALAR.format(r"int32\[\]. Reduce it with jnp.mean")),
    "loss: nothing": (returning(None), TypeError, NO_SCALAR.format("NoneType. Return it")),
    "loss: aux too": (returning(F32(1.0), {"aux": 1}), TypeError, NO_SCALAR.format("tuple. Pass has_aux=True")),
    "aux: one value": (returning((F32(1.0),), has_aux=True), TypeError, NO_AUX.format("1 values")),
    "aux: none": (returning(1.0, has_aux=True), TypeError, NO_AUX.format("float")),
    "aux: none, nnx": (lambda: call(lambda m: 1.0, nnx_linear(), has_aux=True), TypeError, NO_AUX.format("float")),
    "aux: of a watched function": (
        lambda: call(jaxmp.monitor.watch_activations(lambda w: (jnp.sum(w), w)), np.ones(1, F32), has_aux=True),
        TypeError,
        r"got tuple. Return \(loss, \(aux, stats\)\)",
    ),
    "accumulate: 0": (of_loss(accumulate=0), ValueError, "accumulate must be a number of microbatches >= 1; got 0"),
    "accumulate: True": (of_loss(accumulate=True), ValueError, "a number of microbatches >= 1; got True"),
    "accumulate: of the params": (
        of_loss(accumulate=2, accumulate_argnums=(0, 1)),
        ValueError,
        r"must not name differentiated or carried arguments; got \(0, 1\)",
    ),
    "argnums: below": (of_loss(argnums=-3), ValueError, NOT_POSITIONAL.format(-3, 2)),
    "argnums: above": (of_loss(argnums=(0, 5)), ValueError, NOT_POSITIONAL.format(5, 2)),
    "argnums: params by keyword": (
        lambda: jaxmp.value_and_grad(loss_fn)(params=params16(), x=X, opt_state=state_with(1.0)),
        ValueError,
        NOT_POSITIONAL.format(0, 0),
    ),
    "axis_name": (of_loss(axis_name=("data", "model")), ValueError, "axis name 'data' is not bound here.* none"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    run, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        run()


def test_microbatches_on_an_explicit_mesh_of_one_device_are_blocks_of_rows():
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    for spec in (P("data"), P(None, "data"), P()):
        x = jax.device_put(jnp.arange(12.0).reshape(6, 2), NamedSharding(mesh, spec))
        assert_moved(
            jax.jit(lambda x: microbatches.split_microbatches(x, 3))(x),
            np.arange(12, dtype=np.float32).reshape(3, 2, 2),
        )


@pytest.mark.thorough(1)
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("k", [2, 8])
def test_microbatches_of_a_sharded_batch_stay_spread_over_its_devices(axis_type, k):
    """Blocks of rows would lie on some devices only; XLA then has every device compute the whole microbatch."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    rows = 16  # of a microbatch: two for each device
    x = jax.device_put(np.ones((rows * k, 4), F32), NamedSharding(mesh, P("data")))
    w = jax.device_put(np.ones((4, 6), F32), NamedSharding(mesh, P()))
    compute = jaxmp.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2), accumulate=k)
    with jax.set_mesh(mesh) if axis_type == AxisType.Explicit else contextlib.nullcontext():
        program = jax.jit(compute).lower(w, x, opt_state=state_with(1.0)).compile().as_text()
    outputs = set(re.findall(r"= f32\[([\d,]+)\]\S* dot\(", program))
    assert f"{rows // 8},6" in outputs and f"{rows},6" not in outputs
    assert "all-gather" not in program
