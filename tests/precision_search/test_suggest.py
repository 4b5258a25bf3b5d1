"""suggest_policy finds what was planted, and what it suggests runs."""

import collections
import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import sqnr
from jaxmp._src.precision_search import format_noise
from jaxmp._src.precision_search.subject import Subject
from jaxmp._src.precision_search.suggest import Thresholds, _Decision
from jaxmp._src.precision_search.suggestion import exceptions, globs
from jaxmp._src.precision_search.trials import Trial, measure

X, Y = (np.random.default_rng(i).standard_normal((32, 32), np.float32) for i in range(2))


class Planted(nn.Module):
    """Three layers that cannot run as low as the others, each for a reason of its own."""

    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(nn.Dense(32, name="fine")(x))
        large = nn.Dense(32, name="large")(h * 1e5) / 1e6  # activations beyond 65504
        tiny = nn.Dense(32, name="tiny")(h) * 1e-13  # gradients so much smaller than all others that no scale serves
        # One feature leaves no fp8 numbers to the others; its weights are small, so that the others matter.
        spread = jnp.where(jnp.arange(32)[None] == 0, 1e4, 0.02 * h)
        init = nn.initializers.lecun_normal()
        few = nn.Dense(
            32, name="few", kernel_init=lambda *a: init(*a) * jnp.where(jnp.arange(32)[:, None] == 0, 1e-4, 10)
        )(spread)
        return nn.Dense(32, name="head")(h + large + tiny + few)


def all_but_few(learning_rate):
    """Adam, but not for the weights that see the outlier: a step of them would drown all else."""
    return optax.multi_transform(
        {"train": optax.adam(learning_rate), "freeze": optax.set_to_zero()},
        lambda params: {
            name: jax.tree.map(lambda _, n=name: "freeze" if n == "few" else "train", layer)
            for name, layer in params.items()
        },
    )


@functools.cache
def planted():
    jax.jit(lambda x: x.astype(jnp.float16))(jnp.ones(2))  # an error here where XLA has no float16: a search hides it
    model = Planted()
    params = jax.jit(model.init)(jax.random.key(0), X)["params"]

    def loss_fn(params, x, y):
        return 1e-5 * jnp.mean((model.apply({"params": params}, x) - y) ** 2)

    formats = ("fp8", "fp16")
    found = jaxmp.suggest_policy(jax.jit(loss_fn), (X, Y), formats, params=params, optimizer=all_but_few(1e-3), steps=2)
    return params, loss_fn, found


@pytest.mark.thorough(0)
def test_planted_layers_are_named_and_kept_higher():
    _, _, found = planted()
    assert found.formats == {"fine": "fp8", "large": "fp32", "tiny": "fp32", "few": "fp16", "head": "fp8"}
    reason = {(row.module, row.format): row.reason for row in found.evidence}
    assert "of x overflow" in reason["large", "fp16"]
    assert "of dy become zero" in reason["tiny", "fp16"] and not reason["tiny", "fp8"]
    assert "of x become zero" in reason["few", "fp8"] and not reason["few", "fp16"]
    assert found.base == "fp16" and found.policy_kwargs["keep_fp32"] == ("*norm*", "large/*", "tiny/*")
    assert found.fp8_layers == ("fine", "head") and found.modules == {"large": "fp32", "tiny": "fp32"}
    assert found.worst("fp16")[0] == "large"


@pytest.mark.thorough(0)
def test_the_loss_scale_that_is_needed_and_the_one_that_is_too_high():
    params, loss_fn, found = planted()
    least, highest = found.loss_scales
    assert 1 < least < highest and least <= 2.0**24
    grads = jax.jit(jax.grad(loss_fn))(params, X, Y)
    sizes = [np.abs(grads[name]["kernel"]).ravel() for name in ("fine", "few", "head")]
    assert 2.0**13 < highest * max(s.max() for s in sizes) < 2.0**16  # the outlier makes those of `few` the largest
    lost = {scale: max(np.mean(s * scale < 2.0**-25) for s in sizes) for scale in (1.0, least)}
    assert lost[1.0] > 0.5 and lost[least] < 0.02


@pytest.mark.thorough(0)
def test_the_whole_is_checked():
    _, _, found = planted()
    mix = found.mix
    assert 10 < mix.gradient_sqnr < 40 and mix.cosine > 0.95
    assert abs(mix.loss - mix.reference_loss) < 0.05 * mix.reference_loss


@pytest.mark.thorough(0)
def test_the_table_shows_the_evidence_and_the_code():
    _, _, found = planted()
    text = str(found)
    lines = text.splitlines()
    (large,) = (i for i, line in enumerate(lines) if line.startswith("large"))
    assert lines[large + 1].split()[:2] == ["fp16", "-inf"] and lines[large + 1].endswith("of x overflow")
    assert found.code.startswith("# loss_fn and optimizer are yours: give them these names.\n")
    assert text.endswith(found.code) and "dB, cosine" in text and "loss scale of" in text


def dtypes_of_dots(fn, *args):
    def walk(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "dot_general":
                yield tuple(v.aval.dtype.name for v in eqn.invars)
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return list(walk(jax.make_jaxpr(fn)(*args).jaxpr))


def vector(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


@pytest.mark.thorough(0)
def test_pasted_code_trains_linen():
    params32, loss_fn, found = planted()
    pasted = {"jaxmp": jaxmp, "jnp": jnp, "loss_fn": loss_fn, "optimizer": all_but_few(1e-2)}
    exec(found.code, pasted)
    policy, tx, low_loss_fn = pasted["policy"], pasted["tx"], pasted["low_precision_loss_fn"]
    opt_state, params = tx.init(params32), policy.cast_to_param(params32)
    dtypes = {name: params[name]["kernel"].dtype.name for name in found.formats}
    assert dtypes == {name: "float32" if fmt == "fp32" else "float16" for name, fmt in found.formats.items()}

    @jax.jit
    def step(params, opt_state):
        loss, grads = jaxmp.value_and_grad(low_loss_fn)(params, X, Y, opt_state=opt_state)
        params, opt_state = jaxmp.apply_gradients(tx, grads, opt_state, params)
        return params, opt_state, loss

    # What was emulated is what happens.
    exact = jax.jit(jax.grad(loss_fn))(params32, X, Y)
    low = jax.jit(jax.grad(lambda *args: 2.0**16 * low_loss_fn(*args)))(params32, X, Y)
    assert abs(sqnr(vector(exact), vector(low) / 2.0**16) - found.mix.gradient_sqnr) < 5

    losses = []
    for _ in range(10):
        params, opt_state, loss = step(params, opt_state)
        losses.append(float(loss))
    assert losses[-1] < 0.8 * losses[0] and int(jaxmp.get_metrics(opt_state)["skipped_steps"]) <= 2
    dots = dtypes_of_dots(low_loss_fn, params, X, Y)
    assert dots.count(("float32", "float32")) >= 2 and ("float16", "float16") in dots  # large and tiny; few
    assert "float8_e4m3fn" in str(jax.make_jaxpr(low_loss_fn)(params, X, Y))


@pytest.mark.thorough(0)
def test_float16_modules_have_a_loss_scale_under_a_bf16_policy():
    params, loss_fn, found = planted()
    mixed = found._replace(base="bf16", modules={"few": "fp16"}, fp8_layers=())
    pasted = {"jaxmp": jaxmp, "jnp": jnp, "loss_fn": loss_fn, "optimizer": optax.sgd(1e-2)}
    exec(mixed.code, pasted)
    assert jaxmp.get_metrics(pasted["tx"].init(params))["loss_scale"] == min(2.0**16, found.loss_scales[1])
    assert "loss scale" not in str(mixed._replace(formats=dict.fromkeys(found.formats, "bf16"), modules={}))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(32, 32, rngs=rngs)
        self.norm = nnx.LayerNorm(32, rngs=rngs)

    def __call__(self, x):
        return x + self.norm(nnx.relu(self.up(x)))


class Head(nnx.Module):
    """A matmul of its own, which no function of jaxmp turns to fp8."""

    def __init__(self, rngs):
        self.kernel = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (32, 20)))

    def __call__(self, x):
        return x @ self.kernel[...]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.blocks = nnx.List([Block(rngs)])
        self.head = Head(rngs)

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def nnx_loss_fn(model, x, y):
    return jnp.mean((model(x) - y[:, :20]) ** 2)


@pytest.mark.thorough(0)
def test_a_model_where_all_is_well_goes_to_the_lowest_and_its_code_trains_nnx():
    model = Net(nnx.Rngs(0))
    found = jaxmp.suggest_policy(model, (X, Y), loss_fn=nnx_loss_fn, steps=2)
    assert found.formats == {"blocks/0/up": "fp8", "head": "fp16"}
    (row,) = (r for r in found.evidence if (r.module, r.format) == ("head", "fp8"))
    assert row.reason.startswith("is no Dense, DenseGeneral, Einsum or 1x1 Conv layer")
    assert found.base == "fp16" and found.modules == {} and found.policy_kwargs["keep_fp32"] == ("*norm*",)
    assert found.fp8_layers == ("blocks/*",)
    assert found.code.startswith("# loss_fn, optimizer and model are yours: give them these names.\n")

    pasted = {"jaxmp": jaxmp, "jnp": jnp, "loss_fn": nnx_loss_fn, "model": model, "optimizer": optax.adam(1e-2)}
    exec(found.code, pasted)
    optimizer = jaxmp.nnx.Optimizer(model, pasted["tx"], wrt=nnx.Param)
    jaxmp.nnx.cast_to_param(model, pasted["policy"])
    assert model.head.kernel[...].dtype == jnp.float16 and model.blocks[0].norm.scale[...].dtype == jnp.float32

    @nnx.jit
    def step(model, optimizer):
        loss, grads = jaxmp.nnx.value_and_grad(pasted["low_precision_loss_fn"])(
            model, X, Y, opt_state=optimizer.opt_state
        )
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(10)]
    assert losses[-1] < 0.8 * losses[0]


def scoped_loss_fn(params, x):
    for i, w in enumerate(params["layers"]):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.tanh(x @ w)
    return jnp.mean((x @ params["out"]) ** 2)


@pytest.mark.thorough(0)
def test_thresholds_scopes_and_a_mix_that_is_moved_up():
    params = {"layers": [jnp.eye(32) + 0.1 * X, jnp.eye(32) + 0.1 * Y], "out": 0.1 * X}
    subject = Subject(scoped_loss_fn, (X,), params, None, False)
    measured, loss_scale, params = measure(subject, optax.sgd(1e-3), 1)
    trial = Trial(subject, params)

    def decide(**limits):
        return _Decision(subject, measured, loss_scale, trial, ("bf16",), Thresholds(**limits)).suggestion()

    found = decide()
    assert found.formats == {"layer_0": "bf16", "layer_1": "bf16", "": "bf16"} and found.fp8_layers == ()
    strict = decide(gradient_sqnr={"bf16": 200.0})
    assert set(strict.formats.values()) == {"fp32"} and strict.base == "fp32" and strict.mix.gradient_sqnr == np.inf
    assert 'policy = jaxmp.get_policy("fp32")' in strict.code
    moved = decide(mix_sqnr=found.mix.gradient_sqnr + 1)
    (lifted,) = (path for path, name in moved.formats.items() if name == "fp32")
    assert lifted == found.worst("bf16")[0] and moved.mix.gradient_sqnr > found.mix.gradient_sqnr
    assert moved.unnamed == (lifted,) and repr(lifted) in moved.code.splitlines()[-1]


@pytest.mark.thorough(0)
def test_gradients_of_data_do_not_count():
    params = {"layers": [X, Y], "out": X}
    subject = Subject(scoped_loss_fn, (X,), params, None, False)
    assert [gemm.is_data for gemm in subject.gemms] == [True, False, False]
    measured, _, params = measure(subject, optax.sgd(1e-3), 1)
    dx, dw = (format_noise.TENSORS.index(name) for name in ("dx", "dw"))
    assert not measured[0, dx].any() and measured[0, dw].any() and measured[1:, dx].any(axis=1).all()
    found = _Decision(subject, measured, 1.0, Trial(subject, params), ("bf16",), Thresholds()).suggestion()
    assert found.formats["layer_0"] == "bf16"


def scanned_loss_fn(params, x):
    layer = jax.named_scope("layer")(lambda h, w: (jnp.tanh(h @ w), None))
    x, _ = jax.lax.scan(layer, x, params["layers"])
    with jax.named_scope("head"):
        return jnp.mean((x @ params["head"]) ** 2)


@pytest.mark.thorough(0)
def test_each_layer_of_a_scan_counts_for_the_policy():
    params = {"layers": jnp.stack([jnp.eye(32)] * 4), "head": jnp.concatenate([X, Y], axis=1)}
    subject = Subject(scanned_loss_fn, (X,), params, None, False)
    measured, loss_scale, params = measure(subject, optax.sgd(1e-3), 1)
    decision = _Decision(subject, measured, loss_scale, Trial(subject, params), ("bf16", "fp16"), Thresholds())
    for key in (("layer", "bf16"), ("head", "fp16")):  # four layers, and a head of the size of two
        decision.evidence[key] = decision.evidence[key]._replace(reason="planted")
    found = decision.suggestion()
    assert found.base == "fp16" and found.formats == {"layer": "fp16", "head": "bf16"}


@pytest.mark.parametrize(
    "batch", [X, {"x": X}, collections.namedtuple("Batch", "x")(X), (X,), [X]], ids=lambda x: type(x).__name__
)
def test_a_batch_that_is_no_tuple_is_one_argument(batch):
    (given,) = batch if type(batch) in (tuple, list) else (batch,)

    def loss_fn(w, *args):
        assert jax.tree.structure(args) == jax.tree.structure((given,))
        return jnp.sum(jax.tree.leaves(args)[0] @ w)

    subject = Subject(loss_fn, batch, X, None, False)
    assert len(subject.gemms) == 1 and jax.tree.structure(subject.given_batch) == jax.tree.structure((given,))


def test_errors():
    w = jnp.ones((2, 2))
    for missing in ({"gradient_sqnr": {"fp8": 25.0}}, {"tensor_sqnr": {"fp8": 25.0}}, {"underflow": {"fp8": 0.1}}):
        with pytest.raises(ValueError, match=rf"thresholds.{next(iter(missing))} needs .* none for \['fp16', 'bf16'\]"):
            jaxmp.suggest_policy(jnp.dot, (w,), params=w, thresholds=missing)
    for steps in (0, 2.5, "4"):
        with pytest.raises(ValueError, match=f"steps must be a whole number, at least 1; got {steps!r}"):
            jaxmp.suggest_policy(jnp.dot, (w,), params=w, steps=steps)
    with pytest.raises(ValueError, match="formats must be some of .*; got 'fp8'"):
        jaxmp.suggest_policy(jnp.dot, (w,), "fp8", params=w)
    for batch in (None, {}):
        with pytest.raises(TypeError, match=f"batch must be a tuple .*; got {batch!r}. Without any, pass"):
            jaxmp.suggest_policy(jnp.dot, batch, params=w)
    with pytest.raises(ValueError, match="needs params="):
        jaxmp.suggest_policy(jnp.dot, (w,))
    with pytest.raises(ValueError, match="needs loss_fn="):
        jaxmp.suggest_policy(Net(nnx.Rngs(0)), (w,))
    with pytest.raises(ValueError, match="no matmul or convolution"):
        jaxmp.suggest_policy(lambda w: jnp.sum(w), (), params=w)
    with pytest.raises(ValueError, match="the loss in float32 is nan in step 1"):
        jaxmp.suggest_policy(lambda w: jnp.sum(w @ w) * jnp.nan, (), params=w)
    with pytest.raises(ValueError, match="a is an fp8 scale|fp8_lhs_e4m3_log2_scale is an fp8 scale"):
        jaxmp.suggest_policy(lambda p: jnp.sum(p["w"]), (), params={"w": w, "fp8_lhs_e4m3_log2_scale": jnp.zeros(())})


def test_globs_fit_what_was_chosen_and_nothing_else():
    paths = ["a/b", "a/c/d", "a/c/e", "f", ""]
    assert globs(["a/b", "a/c/d", "a/c/e"], paths) == ("a/*",)
    assert globs(["a/c/d", "a/c/e", "f"], paths) == ("a/c/*", "f")
    assert globs(["a/c/d", ""], paths) == ("a/c/d", "")
    assert globs(["up", "a/up"], ["up", "a/up", "b/up"]) == ("/up", "a/*")
    assert globs(["up"], ["up", "a/up"], below=True) == ("/up/*",)
    assert exceptions({"up": "fp32", "a/up": "fp16", "up/in": "fp16"}, "fp16") == {"/up": "fp32", "up/*": "fp16"}
