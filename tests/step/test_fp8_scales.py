"""The optimizer's side of delayed scaling: histories, leaves, checkpoints, and every way to get it wrong."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from fp8_model import (
    GRAD,
    LHS,
    RECIPE,
    RHS,
    guarded,
    histories,
    layer_params,
    make_batch,
    make_step,
    make_tx,
    scale_leaves,
    start,
    to_host,
)
from helpers import assert_close, assert_exact, assert_moved
from jaxmp._src.fp8 import amax_records
from jaxmp._src.step import scales as scales_lib
from jaxmp.fp8 import CurrentScaling, DelayedScaling, get_scales, resize_history
from oracle_data import load

F32 = np.float32
ANY = DelayedScaling(amax_history_len=3, power_of_two=False)
ANY_NAMES = ("fp8_lhs_e4m3_scale", "fp8_rhs_e4m3_scale", "fp8_grad_e5m2_scale")


# What an update does


@pytest.mark.thorough(0)
@pytest.mark.parametrize(("recipe", "shape"), [(RECIPE, (3,)), (ANY, ())], ids=["powers, stacked", "any, scalar"])
def test_each_leaf_follows_its_recipe(recipe, shape):
    """All histories lie in one array, in the order of the tree; each column is the recipe's own state."""
    names = (LHS, RHS, GRAD) if recipe is RECIPE else ANY_NAMES
    first = 0.0 if recipe is RECIPE else 1.0
    params = {"b": {name: np.full(shape, first, F32) for name in names}, "a": {names[0]: np.full(shape, first, F32)}}
    tx = scales_lib.update_amax(recipe)
    state = tx.init(params)
    types = jax.tree.map(jax.typeof, state)
    update, update_alone = jax.jit(tx.update), jax.jit(recipe.update, static_argnames="backward")
    alone = {path: recipe.init(shape) for path in get_scales(params)}
    for i in range(4):
        rng = np.random.default_rng(i)
        amax = jax.tree.map(lambda x, rng=rng: np.asarray(100 * rng.lognormal(size=x.shape), F32), params)
        if i == 2:
            amax["a"] = jax.tree.map(np.zeros_like, amax["a"])
        moves, state = update(amax, state, params)
        params = jax.tree.map(np.add, params, to_host(moves))
        assert jax.tree.map(jax.typeof, state) == types
        for path, x in get_scales(params).items():
            layer, name = path.split("/")
            alone[path] = update_alone(alone[path], amax[layer][name], backward="grad" in path)
            if recipe is RECIPE:
                assert_exact(x, alone[path].scale)
            else:  # p + (new - p) is near new
                assert_close(x, np.asarray(alone[path].scale), rtol=2.0**-11)
                alone[path] = alone[path]._replace(scale=x)
        forward, backward = sorted(state.amax_states, key=lambda group: -group.scale.size)
        for is_gradient, group in ((True, backward), (False, forward)):
            members = [to_host(alone[path]) for path in sorted(alone) if ("grad" in path) == is_gradient]
            assert_exact(group.scale, np.concatenate([np.ravel(m.scale) for m in members]))
            columns = [m.amax_history.reshape(recipe.amax_history_len, -1) for m in members]
            assert_exact(group.amax_history, np.concatenate(columns, axis=1))


def test_a_leaf_that_stays_gets_minus_zero():
    tx = scales_lib.update_amax(RECIPE)
    params = scale_leaves() | {LHS: jnp.float32(-0.0)}
    moves, _ = jax.jit(tx.update)(scale_leaves(), tx.init(params), params)
    assert_exact(moves, {name: F32(-0.0) for name in moves})
    assert_moved(optax.apply_updates(params, moves), params)


@pytest.mark.parametrize("power_of_two", [False, True])
def test_only_what_clips_counts_as_saturated(power_of_two):
    """fp8_max / amax is rounded, and so is its product with amax: an ulp above fp8_max is no saturation."""
    recipe = DelayedScaling(amax_history_len=2, power_of_two=power_of_two)
    name = "fp8_lhs_e4m3_log2_scale" if power_of_two else "fp8_lhs_e4m3_scale"
    amaxes = np.random.default_rng(0).uniform(0.5, 2, 1000).astype(np.float32)
    tx = scales_lib.update_amax(recipe)

    @jax.jit
    def saturated(amaxes, next_amaxes):
        params = {name: jnp.full(amaxes.shape, 0.0 if power_of_two else 1.0)}
        updates, state = tx.update({name: amaxes}, tx.init(params), params)
        return tx.update({name: next_amaxes}, state, optax.apply_updates(params, updates))[1].saturated_tensors

    assert saturated(amaxes, amaxes) == 0
    above = np.where(np.arange(1000) < 100, amaxes * np.float32(2.01), amaxes)
    assert saturated(amaxes, above) == 100


def test_any_scale_moves_by_at_most_4096_a_step_and_the_state_records_the_leaf():
    tx = scales_lib.update_amax(ANY)
    params = {name: jnp.ones(()) for name in ANY_NAMES}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for amax in (1e-9, 1e-9, 3.0, 1e9, 1e9, 1e9, 0.1, 0.0, np.inf, 448.0):
        before = get_scales(params)
        moves, state = update(dict.fromkeys(ANY_NAMES, F32(amax)), state, params)
        params = optax.apply_updates(params, moves)
        after = get_scales(params)
        forward, backward = sorted(state.amax_states, key=lambda group: -group.scale.size)
        recorded = [*to_host(forward.scale), *to_host(backward.scale)]
        assert_moved([after[name] for name in ANY_NAMES], recorded)
        for name in ANY_NAMES:
            assert 2.0**-12.01 <= float(after[name]) / float(before[name]) <= 2.0**12.01
    assert float(after[ANY_NAMES[0]]) != 1


def test_mixed_precision_skips_an_inf_whatever_the_semantics():
    tx = make_tx("bf16", optax.sgd(0.1), DelayedScaling(amax_history_len=3, semantics="te"))
    params, opt_state = start(tx, "bf16", layer_params(0))
    grads = {"w": jnp.ones_like(params["w"])} | scale_leaves(value=np.inf)
    _, new = jax.jit(tx.update)(grads, opt_state, params)
    assert bool(jaxmp.get_metrics(new)["skipped"])
    assert_moved(guarded(new), guarded(opt_state))


def test_state_starts_from_the_leaves():
    """A model that is loaded with its leaves goes on with their scales."""
    params = {LHS: F32(5.0), GRAD: F32(-3.0)}
    state = scales_lib.update_amax(RECIPE).init(params)
    assert sorted(float(group.scale[0]) for group in state.amax_states) == [0.125, 32.0]
    assert get_scales(params) == {LHS: 32.0, GRAD: 0.125}
    (group,) = scales_lib.update_amax(ANY).init({ANY_NAMES[0]: F32(0.3)}).amax_states
    assert_exact(group.scale, F32([0.3]))
    assert get_scales({"LayerNorm_0": {"scale": jnp.ones(2)}}) == {}


# TransformerEngine, through params, optimizer and records


def _te_cases():
    """The recorded traces of finite amaxes, by the length of the history."""
    finite = lambda case: all(a is None or 2.0**-86 < a < np.inf or a == 0 for row in case["amaxes"] for a in row)  # noqa: E731
    cases = {}
    for case in load("te_delayed_scaling")["cases"]:
        if finite(case):
            cases.setdefault(case["history_len"], []).append(case)
    return cases


TE_CASES = _te_cases()


@pytest.mark.thorough(1)
@pytest.mark.parametrize("length", TE_CASES)
def test_a_layer_casts_with_the_scale_of_transformer_engine(length):
    """Bit for bit, for any jump: `apply_gradients` writes the leaf, and adds nothing to it. Each case is a layer."""
    params, recipes, rows = {"w": np.ones(1, F32)}, {}, {}
    for i, case in enumerate(TE_CASES[length]):
        name = ANY_NAMES[2 if case["fmt"] == "E5M2" else 0]
        params[f"case_{i}"] = {name: np.ones(len(case["amaxes"][0]), F32)}
        recipes[f"case_{i}/*"] = DelayedScaling(
            margin=case["margin"],
            amax_history_len=length,
            amax_compute=case["algo"],
            power_of_two=False,
            semantics="te",
        )
        amaxes = [[0.0 if a is None else a for a in row] for row in case["amaxes"]]
        rows[f"case_{i}/{name}"] = np.array(amaxes, F32), [np.array(row[1], F32) for row in case["trace"]]
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=recipes)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, amaxes):
        grads = {"w": jnp.ones(1)}
        for path, amax in amaxes.items():
            layer, name = path.split("/")
            grads[layer] = {name: amax_records.record(amax, amax > 0)}
        return jaxmp.apply_gradients(tx, grads, opt_state, params)

    for i in range(max(len(trace) for _, trace in rows.values())):
        amaxes = {path: seen[min(i, len(seen) - 1)] for path, (seen, _) in rows.items()}
        params, opt_state = step(params, opt_state, amaxes)
        scales = get_scales(params)
        for path, (_, trace) in rows.items():
            if i < len(trace):
                assert_exact(scales[path], trace[i])


# Histories of another length


@pytest.mark.thorough(0)
@pytest.mark.parametrize("length", [1, 3, 6])
def test_resized_histories_keep_the_newest(length):
    tx, other = make_tx("bf16", optax.sgd(0.1)), DelayedScaling(amax_history_len=length)
    params, opt_state = start(tx, "bf16", layer_params(0))
    update = jax.jit(tx.update)
    for amax in (1.0, 2.0, 4.0, 3.0):
        grads = {"w": jnp.ones_like(params["w"])} | scale_leaves(value=amax)
        updates, opt_state = update(grads, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert histories(opt_state)[0][:, 0].tolist() == [0.0, 2.0, 4.0, 3.0]
    with pytest.warns(
        UserWarning, match=f"of length 4 becomes one of length {length}; the newest amaxes are"
    ) as caught:
        resized = resize_history(opt_state, other)
    assert [warning.filename for warning in caught] == [__file__]
    expected = {1: [0.0], 3: [0.0, 4.0, 3.0], 6: [0.0, 0.0, 0.0, 2.0, 4.0, 3.0]}[length]
    for history in histories(resized):
        for column in range(history.shape[1]):
            assert_exact(history[:, column], F32(expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_moved(resize_history(opt_state, RECIPE), opt_state)
    # training continues, and an update with the wrong length names the fix
    other_tx = make_tx("bf16", optax.sgd(0.1), other)
    jax.eval_shape(other_tx.update, grads, resized, params)
    message = f"the amax history must have the length {length}; got 4. Call jaxmp.fp8.resize_history"
    with pytest.raises(ValueError, match=message):
        other_tx.update(grads, opt_state, params)


def test_resized_histories_of_pmap_keep_their_copies():
    opt_state = make_tx("bf16").init(layer_params(0))
    copies = jax.tree.map(lambda x: jnp.stack([x, x]), opt_state)
    with pytest.warns(UserWarning, match="length 4 becomes one of length 2"):
        resized = resize_history(copies, DelayedScaling(amax_history_len=2))
    assert [h.shape for h in histories(resized)] == [(2, 2, h.shape[-1]) for h in histories(opt_state)]


# Bad input


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: make_tx("fp8").init({"w": jnp.ones(2)}),
            r"params must hold fp8 scales; got none. In linen, .*autocast.*; in nnx, .*to_fp8.*recipe=",
        ),
        (
            lambda: make_tx("fp32", recipe=DelayedScaling(fp8_format="E4M3")).init(layer_params(0)),
            rf"the recipe must be the one of the layer; got .*fp8_format='E4M3'.* for {GRAD}, which holds powers of "
            r"two for float8_e5m2. Pass both the same recipe",
        ),
        (
            lambda: make_tx("bf16", recipe=None).init({"a": layer_params(0)}),
            rf"fp8 scales are moved by a recipe, not by the optimizer; got a/{GRAD} in the params and no recipe",
        ),
        (
            lambda: make_tx("bf16", recipe={"a/*": RECIPE}).init({"b": layer_params(0)}),
            rf"each fp8 scale needs a recipe; none of \['a/\*'\] fits b/{GRAD}. Add '\*' as the last",
        ),
        (
            lambda: make_tx("bf16", recipe={"a/*": RECIPE, "*": CurrentScaling()}).init({"b": layer_params(0)}),
            rf"got CurrentScaling\(.*for b/{GRAD}, which holds powers",
        ),
        (
            lambda: scales_lib.check_scales(RECIPE, scale_leaves(), scales_lib.update_amax(RECIPE).init({LHS: F32(0)})),
            r"must fit recipe and params; got groups of \[1\] fp8 scales, not \[1, 2\]. Call tx.init",
        ),
    ],
    ids=["no_leaves", "format", "no_recipe", "no_pattern", "stateless_pattern", "other_state"],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


# The contract of a chain


@pytest.mark.thorough(0)
def test_state_keeps_structure_and_types():
    tx = make_tx("fp16", optax.sgd(0.1))
    state = start(tx)
    types = jax.tree.map(jax.typeof, state)
    step = jax.jit(make_step(tx))
    for i in range(2):
        batch = make_batch(i)
        batch["x"][0, 0] = np.inf if i == 1 else 1
        state, _ = step(state, batch)
        assert jax.tree.map(jax.typeof, state) == types
    assert not any(jax.typeof(x).weak_type for x in jax.tree.leaves(state))
