"""A proposal that does not train is never shown: its code is run, and what it ran is told."""

import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmp
from helpers import assert_moved
from jaxmp._src.precision_search import rehearsal
from jaxmp._src.precision_search.subject import Subject
from jaxmp._src.precision_search.suggestion import Mix, Operation, Run, Suggestion
from jaxmp._src.programs import operations

X, Y = (np.random.default_rng(i).standard_normal((16, 16), np.float32) for i in range(2))
IDS = np.arange(16) % 6


class Gated(nn.Module):
    """A GLU whose product lies beyond 65504, and comes back."""

    @nn.compact
    def __call__(self, x):
        gate, up = nn.Dense(16, name="gate")(x), nn.Dense(16, name="up")(x)
        return nn.Dense(16, name="down")(jnp.tanh((gate * 300) * (up * 300) / 9e4))


class Plants(nn.Module):
    """Nothing here is in a matmul: an embedding below float16, a product and a residual beyond it."""

    plants: tuple = ("embedding", "residual", "glu")

    @nn.compact
    def __call__(self, ids):
        tiny = 1e-8 if "embedding" in self.plants else 1.0
        x = nn.Embed(6, 16, embedding_init=nn.initializers.normal(tiny), name="embed")(ids) / tiny
        x = nn.LayerNorm(name="norm")(nn.Dense(16, name="first")(x))
        if "residual" in self.plants:
            x = (nn.Dense(16, name="side")(x) * 3e4 + nn.Dense(16, name="main")(x)) * 2e-5
        if "glu" in self.plants:
            x = x + Gated(name="glu")(x)
        return nn.Dense(16, name="head")(x)


def optimizer():
    """Adam; the embedding by its own learning rate: a step of Adam is larger than all of it."""
    label = functools.partial(jax.tree_util.tree_map_with_path, lambda path, _: path[0].key == "embed")
    return optax.multi_transform({False: optax.adam(3e-3), True: optax.sgd(1e-17)}, label)


def case(plants):
    model = Plants(plants)
    params = jax.jit(model.init)(jax.random.key(0), IDS)["params"]
    return params, lambda params, ids, y: jnp.mean((model.apply({"params": params}, ids) - y) ** 2)


def trains(found, params, loss_fn, steps=30):
    """Losses and skips of the printed code, as a user would run it."""
    pasted = {"jaxmp": jaxmp, "jnp": jnp, "loss_fn": loss_fn, "optimizer": optimizer()}
    exec(found.code, pasted)
    tx, low_loss_fn = pasted["tx"], pasted["low_precision_loss_fn"]

    def step(state, _):
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(low_loss_fn)(params, IDS, Y, opt_state=opt_state)
        return jaxmp.apply_gradients(tx, grads, opt_state, params), loss

    start = pasted["policy"].cast_to_param(params), tx.init(params)
    (_, opt_state), losses = jax.jit(lambda start: jax.lax.scan(step, start, None, length=steps))(start)
    return np.asarray(losses), int(jaxmp.get_metrics(opt_state)["skipped_steps"])


def check(plants, formats):
    params, loss_fn = case(plants)
    said = []
    found = jaxmp.suggest_policy(
        loss_fn, (IDS, Y), formats, params=params, optimizer=optimizer(), steps=1, progress=said.append
    )
    losses, skipped = trains(found, params, loss_fn)
    assert skipped <= 2 and losses[-1] < 0.8 * losses[0]
    assert not found.run.problems and found.run.steps == rehearsal.STEPS and found.run.skipped <= 2
    assert abs(found.run.losses[0] - losses[0]) < 1e-3 * losses[0] or found.run.skipped
    assert any("running the code of a proposal" in line for line in said)
    return found


@pytest.mark.thorough(0)
def test_plants_outside_of_matmuls_are_found_before_a_proposal_is_shown():
    found = check(("embedding",), ("fp16",))
    assert found.rejected and "fp16" in found.formats.values()  # mended, not given up
    problems = {p.path: p for rejected in found.rejected for p in rejected.problems}
    assert "its cast to float16 has" in problems["embed/embedding"].message
    assert "embed/*" in found.keep_fp32 and found.modules["embed"] == "fp32"
    text = str(found)
    assert "ran, but does not train: " in text and f"this code ran {rehearsal.STEPS} steps on the batch" in text
    assert "operations give 16 bits" in text and "params the worst is" in text
    assert {p.path for p in found.run.params} >= {"embed/embedding", "norm/scale", "head/bias"}


@pytest.mark.thorough(0)
@pytest.mark.parametrize("formats", [("fp8", "fp16", "bf16"), ("fp16",), ("bf16",), ("fp8", "fp16")], ids="-".join)
@pytest.mark.parametrize("plants", ["embedding", "residual", "glu", "embedding residual glu"])
def test_plants_of_all_kinds(plants, formats):
    check(tuple(plants.split()), formats)


def suggestion(base, **fields):
    """A proposal that was not measured."""
    empty = dict(formats={"a": base, "b": base}, base=base, keep_fp32=(), fp8_layers=(), modules={}, unnamed=())
    more = dict(is_nnx=False, loss_scales=(1.0, 2.0**16), tensors=(), evidence=(), mix=Mix(0.0, 0.0, 0.0, 0.0))
    return Suggestion(**(empty | more | fields))


class Statistics(nn.Module):
    """BatchNorm and dropout. The gradient of a bias before a norm is rounding noise in every dtype."""

    @nn.compact
    def __call__(self, x):
        x = nn.BatchNorm(use_running_average=False, name="norm")(nn.Dense(16, name="a")(x))
        return nn.Dense(16, name="b")(nn.Dropout(0.2, deterministic=False)(nn.relu(x)))


@pytest.mark.thorough(0)
def test_batch_statistics_dropout_and_aux():
    model = Statistics()
    variables = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, X)

    def loss_fn(params, batch_stats, key, x, y):
        variables = {"params": params, "batch_stats": batch_stats}
        out, new = model.apply(variables, x, rngs={"dropout": key}, mutable=["batch_stats"])
        return jnp.mean((out - y) ** 2), new

    batch = variables["batch_stats"], jax.random.key(2), X, Y
    subject = Subject(loss_fn, batch, variables["params"], None, True)
    run = rehearsal.Rehearsal(subject, optax.adam(1e-2), suggestion("fp32").code).run(suggestion("bf16"))
    assert not run.problems and run.cosine > 0.999 and run.losses[-1] < run.losses[0]
    by_path = {p.path: p for p in run.params}
    assert by_path["a/bias"].cosine == 1.0 and 0.99 < by_path["a/kernel"].cosine < 1.0
    assert any(x.place.backward for x in run.operations) and any(x.place.path == "a" for x in run.operations)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 16, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(16, rngs=rngs), nnx.Dropout(0.2, rngs=rngs)
        self.tiny = nnx.Param(jnp.full((16,), 1e-8))

    def __call__(self, x):
        return self.b(self.drop(nnx.relu(self.norm(self.a(x)))) * (self.tiny[...][None] * 1e8))


@pytest.mark.thorough(0)
def test_an_nnx_module_with_a_param_below_float16():
    """Its own state moves on in a copy; the model stays as it is."""
    model = NnxNet(nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    subject = Subject(model, (X, Y), None, lambda model, x, y: jnp.mean((model(x) - y) ** 2), False)
    tried = rehearsal.Rehearsal(subject, optax.sgd(1e-18), suggestion("fp32", is_nnx=True).code)
    run = tried.run(suggestion("fp16", is_nnx=True))
    assert any(p.path == "tiny" and "cast to float16" in p.message for p in run.problems)
    assert_moved(nnx.to_pure_dict(nnx.state(model, nnx.Param)), before)


def test_code_that_cannot_run_is_a_problem_too():
    subject = Subject(lambda p, x: jnp.mean((x @ p["a"]) ** 2), (X,), {"a": Y}, None, False)
    tried = rehearsal.Rehearsal(subject, optax.sgd(1e-3), suggestion("fp32").code)
    (problem,) = tried.run(
        suggestion("fp16", keep_fp32=("no such param",), fp8_layers=None, modules={"a": "no"})
    ).problems
    assert problem.message.startswith("the code raises KeyError")


def half(fn, *args):
    """The findings about the 16-bit operations of a function."""
    look = operations.Look(rehearsal._measure)
    closed = jax.make_jaxpr(fn)(*args)
    found = jax.jit(lambda *given: (look.run(closed, given), look.found)[1])(*args)
    return [Operation(look.places[key], *map(float, value)) for key, value in found.items()]


@pytest.mark.thorough(2)
@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda h: jnp.tanh(h * 3e4), "50% of mul in .* exceed float16, which ends at 65504: they reach 9e[+]04"),
        (lambda h: 1 / jnp.exp(5 * h), "50% of exp in .* exceed float16"),
        (lambda h: h.astype(jnp.float32) * 1e-8 + h.astype(jnp.float16), None),
        (lambda h: jnp.sum((h.astype(jnp.float32) * 1e-8).astype(jnp.float16)), "100% of convert_element_type"),
        (lambda h: jax.nn.softmax(jnp.where(h > 2, h, -jnp.inf)), None),  # a mask is infinite from the start
        (lambda h: h @ jnp.full((2, 2), 3e4, jnp.float16), "of dot_general in .* exceed float16"),
        (lambda h: jax.nn.gelu(h - 8), None),  # a few tails become zero
    ],
    ids=["product", "exp", "float32", "tiny", "mask", "matmul", "tails"],
)
def test_each_operation_in_16_bits_is_compared_with_float32(fn, words):
    problems = rehearsal._of_operations(tuple(half(fn, np.float16([[1.0, 3.0], [2.0, 3.0]]))))
    if words is None:
        assert not problems
    else:
        assert re.search(words, problems[0].message), problems


RUN = Run(3, 0, (2.0, 1.5, 1.0), (2.0, 1.5, 1.0), 1.0, 60.0, 1.0, (), (), ())


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (RUN, ""),
        (RUN._replace(losses=(2.01, 1.6, 1.2)), ""),
        (RUN._replace(losses=(2.0, 2.0, 2.0)), "the loss goes from 2 to 2, in float32 from 2 to 1"),
        (RUN._replace(losses=(2.0, np.nan, 1.0)), "the loss is nan"),
        (RUN._replace(steps=1, skipped=20), "20 of 21 steps were skipped"),
        (RUN._replace(skipped=5, loss_scale=256.0), "5 steps were skipped until the loss scale was 256"),
        (RUN._replace(losses=(2.5, 2.0, 1.0)), "the loss goes from 2.5 to 1"),
    ],
    ids=["same", "near", "idle", "nan", "skips", "scale", "other_loss"],
)
def test_a_run_that_does_not_train(run, words):
    problems = rehearsal._of_steps(run, 3)
    assert [p.message[: len(words)] for p in problems] == ([words] if words else [])


@pytest.mark.thorough(0)
def test_a_time_budget_ends_the_trials_but_not_the_run():
    found = jaxmp.suggest_policy(
        lambda p, x: jnp.mean((x @ p) ** 2), (X,), ("bf16",), params=Y, steps=1, time_budget=1e-9, progress=None
    )
    (row,) = found.evidence
    assert row.reason == "the time budget was spent before it was tried"
    assert found.base == "fp32" and found.run.steps == rehearsal.STEPS
