"""A job that got or lost something goes on: what is missing starts fresh where asked for, and is reported."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmp
from helpers import assert_exact, assert_moved
from jaxmp import checkpoint
from jaxmp._src.base import tree_paths

RNG = np.random.default_rng(0)
PARAMS = {
    "body": {"kernel": jnp.asarray(RNG.normal(size=(4, 6)), jnp.float32)},
    "head": jnp.asarray(RNG.normal(size=(6, 3)), jnp.float32),
}
POLICY = jaxmp.get_policy("bf16")
ADAM = optax.adam(1e-2)
SCHEDULED = optax.adam(optax.linear_schedule(0.0, 1e-2, 10))
MOVED = (("0", "1/0"),)


def mixed(inner):
    return jaxmp.mixed_precision(inner, POLICY)


@functools.cache
def trained():
    """(params, opt_state) of Adam after a step."""
    tx = mixed(ADAM)
    params, opt_state = POLICY.cast_to_param(PARAMS), tx.init(PARAMS)
    jaxmp.get_loss_scale(())  # the gradients are made by hand
    return jax.jit(lambda p, s: jaxmp.apply_gradients(tx, p, s, p))(params, opt_state)


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    with checkpoint.manager(tmp_path_factory.mktemp("partial")) as manager:
        checkpoint.save(manager, 3, params=trained()[0], opt_state=trained()[1], extra={"data": {"seen": 7}})
        manager.wait_until_finished()
        yield manager


def moments(opt_state, *names):
    return {name: optax.tree.get(opt_state, name) for name in names}


# {what was added: (the new optimizer, patterns, what is fresh, what is left over, what has moved)}
ADDED = {
    "clipping": (optax.chain(jaxmp.clip_by_global_norm(1.0), ADAM), "grad_norm", ("0/grad_norm",), (), MOVED),
    "a schedule": (SCHEDULED, "1/count", ("1/count",), (), ()),
    "an average": (
        optax.chain(ADAM, jaxmp.ema_params(0.9)),
        "*ema_*",
        ("1/ema_count", "1/ema_weight", "1/ema_params/body/kernel", "1/ema_params/head"),
        (),
        (("0", "0/0"),),
    ),
}


@pytest.mark.thorough(1)
@pytest.mark.parametrize("name", ADDED)
def test_what_is_added_to_the_chain_starts_fresh(name, steps):
    inner, partial, fresh, left_over, moved = ADDED[name]
    tx = mixed(inner)
    with pytest.raises(ValueError, match="same inner optimizer"):
        checkpoint.restore(steps, tx, params=trained()[0])
    restored = checkpoint.restore(steps, tx, params=trained()[0], partial=partial)
    assert restored.report == (fresh, left_over, moved)
    assert jax.tree.structure(restored.opt_state) == jax.tree.structure(tx.init(PARAMS))
    assert_moved(restored.params, trained()[0])
    assert_moved(jaxmp.get_master_params(*restored[2:0:-1]), jaxmp.get_master_params(*trained()[::-1]))
    assert_moved(moments(restored.opt_state, "mu", "nu"), moments(trained()[1], "mu", "nu"))
    if name == "an average":  # of the weights as they are
        assert_exact(
            jaxmp.get_ema_params(restored.opt_state, restored.params),
            jaxmp.get_ema_params(tx.init(jaxmp.get_master_params(*trained()[::-1])), trained()[0]),
        )


def test_what_is_left_over_is_listed(steps):
    """From Adam to Lion and to SGD: the first moment stays, or nothing does."""
    restored = checkpoint.restore(steps, mixed(optax.lion(1e-3)), params=trained()[0], partial="nu/*")
    assert restored.report.left_over == ("0/nu/body/kernel", "0/nu/head") and restored.report.fresh == ()
    assert_moved(moments(restored.opt_state, "mu"), moments(trained()[1], "mu"))
    sgd = mixed(optax.sgd(0.1, momentum=0.9))
    partial = ("trace/*", "mu/*", "nu/*", "count")
    for patterns in (partial[1:], partial[:-1]):
        with pytest.raises(ValueError, match="same inner optimizer"):
            checkpoint.restore(steps, sgd, params=trained()[0], partial=patterns)
    report = checkpoint.restore(steps, sgd, params=trained()[0], partial=partial).report
    assert report.fresh == ("0/trace/body/kernel", "0/trace/head") and len(report.left_over) == 5


@pytest.mark.thorough(0)
def test_leaves_of_lora_start_fresh_with_their_masters_and_moments(steps):
    more = PARAMS | {"body": PARAMS["body"] | {"lora_a": jnp.full((4, 2), 0.1), "lora_b": jnp.zeros((2, 6))}}
    params, tx = POLICY.cast_to_param(more), mixed(ADAM)
    with pytest.raises(ValueError, match="body/lora_a is in the model and not in the checkpoint"):
        checkpoint.restore(steps, tx, params=params)
    restored = checkpoint.restore(steps, tx, params=params, partial="*lora_*")
    assert restored.report.fresh[:2] == ("body/lora_a", "body/lora_b") and len(restored.report.fresh) == 6
    assert_moved(restored.params["body"]["lora_a"], params["body"]["lora_a"])
    assert_moved(restored.params["head"], trained()[0]["head"])
    masters = jaxmp.get_master_params(restored.opt_state, restored.params)
    assert_exact(masters["body"]["lora_a"], params["body"]["lora_a"].astype(jnp.float32))
    assert_moved(masters["head"], jaxmp.get_master_params(*trained()[::-1])["head"])
    mu, old = (moments(s, "mu")["mu"] for s in (restored.opt_state, trained()[1]))
    assert_moved(mu["body"]["kernel"], old["body"]["kernel"])
    assert not np.any(mu["body"]["lora_a"])
    new = jaxmp.apply_gradients(tx, restored.params, restored.opt_state, restored.params)[0]  # it goes on
    assert jax.tree.structure(new) == jax.tree.structure(params)
    shapes = jax.eval_shape(lambda: params)
    with pytest.raises(ValueError, match="starts fresh needs a value; body/lora_a is not in the checkpoint"):
        checkpoint.restore(steps, tx, params=shapes, partial="*lora_*")


@pytest.mark.thorough(1)
@pytest.mark.parametrize("with_state", [True, False], ids=["with-state", "params-alone"])
def test_a_new_head_starts_fresh(with_state, steps):
    """The same name with other shapes, and no head at all."""
    tx = mixed(ADAM) if with_state else None
    params = trained()[0] | {"head": jnp.ones((6, 10), jnp.bfloat16)}
    with pytest.raises(ValueError, match=r"head has shape \(6, 3\) in the checkpoint and \(6, 10\) in the model"):
        checkpoint.restore(steps, tx, params=params, partial="body/*")
    restored = checkpoint.restore(steps, tx, params=params, partial="head")
    of_state = ("0/mu/head", "0/nu/head") if with_state else ()
    assert restored.report == (("head", *of_state), (), ())
    assert restored.params["head"].shape == (6, 10)
    if with_state:
        masters = jaxmp.get_master_params(restored.opt_state, restored.params)
        assert_exact(masters["head"], np.ones((6, 10), np.float32))
        assert_moved(masters["body"], jaxmp.get_master_params(*trained()[::-1])["body"])
        assert moments(restored.opt_state, "mu")["mu"]["head"].shape == (6, 10)
    report = checkpoint.restore(steps, tx, params={"body": params["body"]}, partial="head").report
    assert report == ((), ("head", *of_state), ())


def test_other_trees_may_be_missing(steps):
    extra = {"data": {"seen": 0, "epoch": 4}, "rngs": jnp.arange(2)}
    for patterns in ((), "rngs", "data/epoch"):
        with pytest.raises(ValueError, match="every (tree|leaf) of extra="):
            checkpoint.restore(steps, None, params=trained()[0], extra=extra, partial=patterns)
    restored = checkpoint.restore(steps, None, params=trained()[0], extra=extra, partial=("rngs", "data/epoch"))
    assert restored.extra["data"] == {"seen": 7, "epoch": 4} and restored.extra["rngs"].tolist() == [0, 1]
    assert restored.report.fresh == ("data/epoch", "rngs")
    with pytest.raises(ValueError, match="starts fresh needs a value; rngs is not in the checkpoint"):
        checkpoint.restore(
            steps, None, params=trained()[0], extra={"rngs": jax.eval_shape(lambda: extra["rngs"])}, partial="rngs"
        )


def test_states_that_cannot_be_told_apart_are_an_error(tmp_path):
    """One momentum saved, two wanted: which of them is the new one?"""
    one, two = optax.trace(0.9), optax.chain(optax.trace(0.5), optax.trace(0.9))
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=PARAMS, opt_state=mixed(optax.chain(one)).init(PARAMS))
        manager.wait_until_finished()
        for partial in ("skipped_steps", "*", "trace/*"):  # also where both may be missing: the saved one stays
            with pytest.raises(ValueError, match="1 with trace/body/kernel, trace/head, and the new optimizer 2"):
                checkpoint.restore(manager, mixed(two), params=PARAMS, partial=partial)


def test_the_error_of_two_schedules_names_a_pattern_that_keeps_the_saved_one(tmp_path):
    one = optax.chain(optax.trace(0.9), optax.scale_by_schedule(lambda count: -0.1))
    params, state = POLICY.cast_to_param(PARAMS), mixed(one).init(PARAMS)
    jaxmp.get_loss_scale(())  # the gradients are made by hand
    params, state = jax.jit(lambda p, s: jaxmp.apply_gradients(mixed(one), p, s, p))(params, state)
    two = mixed(optax.chain(optax.trace(0.9), *[optax.scale_by_schedule(lambda count: -0.1)] * 2))
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=params, opt_state=state)
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="1 with count, and the new optimizer 2.* such as '/2/count'"):
            checkpoint.restore(manager, two, params=params, partial="*")
        restored = checkpoint.restore(manager, two, params=params, partial="/2/count")
    assert restored.report == (("2/count",), (), ())
    inner = restored.opt_state.optimizer_state
    assert [int(inner[1].count), int(inner[2].count)] == [1, 0]
    assert_moved(inner[0].trace, state.optimizer_state[0].trace)


def test_what_may_be_missing_is_taken_if_it_is_there(steps):
    """Adam's first moment and count go to Lion, although both fit the patterns."""
    restored = checkpoint.restore(steps, mixed(optax.lion(1e-3)), params=trained()[0], partial="*")
    assert restored.report == ((), ("0/nu/body/kernel", "0/nu/head"), ())
    assert_moved(moments(restored.opt_state, "mu", "count"), moments(trained()[1], "mu", "count"))


def test_a_pattern_that_fits_nothing_is_warned_of(steps):
    with pytest.warns(UserWarning, match=r"restore\(partial=\): the pattern 'haed' fits no leaf. Close to it: 'head'"):
        report = checkpoint.restore(steps, mixed(ADAM), params=trained()[0], partial="haed").report
    assert report == ((), (), ())


def test_without_patterns_the_report_is_empty(steps):
    restored = checkpoint.restore(steps, mixed(ADAM), params=trained()[0])
    step, _, opt_state, _ = restored
    assert step == 3 and restored.report == ((), (), ())
    assert_moved(opt_state, trained()[1])


def test_an_fp8_layer_that_is_gone_leaves_the_histories_of_others(tmp_path):
    """Histories are found by the order of all scales that were saved; without one of them, all started again."""
    scales = {"fp8_lhs_e4m3_log2_scale": 1.0, "fp8_rhs_e4m3_log2_scale": 2.0, "fp8_grad_e5m2_log2_scale": 3.0}
    params = {name: {"kernel": jnp.ones((2, 2))} | jax.tree.map(jnp.float32, scales) for name in "abc"}
    recipe = jaxmp.fp8.DelayedScaling(amax_history_len=3)
    tx = jaxmp.mixed_precision(optax.sgd(0.1), "fp32", recipe=recipe)
    number = lambda path, x: jnp.arange(float(x.size)).reshape(x.shape) if "amax_history" in path else x  # noqa: E731
    state = tree_paths.map_with_path(number, tx.init(params))
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=params, opt_state=state)
        manager.wait_until_finished()
        restored = checkpoint.restore(manager, tx, params={"c": params["c"]}, partial=("a/*", "b/*"))
    assert_moved(restored.params, {"c": params["c"]})
    assert {path.split("/")[0] for path in restored.report.left_over} == {"a", "b"}
    before, after = (optax.tree.get(s, "amax_states") for s in (state, restored.opt_state))
    for old, new, size in zip(before, after, (1, 2), strict=True):  # of gradients; of inputs and weights
        assert_moved(new.amax_history[1:], old.amax_history[1:, -size:])


# moments=: another optimizer or schedule on purpose


def restored_with(steps, inner, moments, **kwargs):
    found = checkpoint.restore(steps, mixed(inner), params=trained()[0], moments=moments, **kwargs)
    assert_moved(found.params, trained()[0])
    assert_moved(jaxmp.get_master_params(*found[2:0:-1]), jaxmp.get_master_params(*trained()[::-1]))
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(mixed(inner).init(PARAMS))
    assert_moved(found.opt_state.skipped_steps, trained()[1].skipped_steps)
    return found


ADAM_LEAVES = ("0/count", "0/mu/body/kernel", "0/mu/head", "0/nu/body/kernel", "0/nu/head")


def test_a_schedule_comes_to_a_constant_learning_rate(steps):
    """It was refused for its count."""
    found = restored_with(steps, SCHEDULED, "fit")
    assert found.report == (("1/count",), (), ())
    assert_moved(moments(found.opt_state, "mu", "nu"), moments(trained()[1], "mu", "nu"))
    assert [int(x) for _, x in optax.tree.get_all_with_path(found.opt_state, "count")] == [1, 0]


def test_what_fits_is_found_where_it_stands_now(steps):
    found = restored_with(steps, optax.chain(jaxmp.clip_by_global_norm(1.0), SCHEDULED), "fit")
    assert found.report == (("0/grad_norm", "1/1/count"), (), MOVED)
    assert_moved(moments(found.opt_state, "mu", "nu"), moments(trained()[1], "mu", "nu"))


def test_a_schedule_at_the_place_of_adam_does_not_take_its_count(tmp_path):
    """Also where the chain before had another transform first."""
    before, after = optax.scale_by_adam(), optax.scale_by_schedule(lambda count: -0.1)
    tx = mixed(optax.chain(optax.clip(1.0), before))
    params, opt_state = trained()[0], tx.init(PARAMS)
    jaxmp.get_loss_scale(())  # the gradients are made by hand
    params, opt_state = jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, params), opt_state, params)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=params, opt_state=opt_state)
        with pytest.raises(ValueError, match="on purpose, pass moments= to restore"):
            checkpoint.restore(manager, mixed(optax.chain(before, after)), params=params)
        found = checkpoint.restore(manager, mixed(optax.chain(before, after)), params=params, moments="fit")
    assert found.report == (("1/count",), (), (("1", "0"),))
    assert_moved(moments(found.opt_state, "mu", "nu"), moments(opt_state, "mu", "nu"))


def test_nothing_of_the_moments_is_kept_on_request(steps):
    found = restored_with(steps, ADAM, "reset")
    assert found.report == (ADAM_LEAVES, (), ())
    fresh = mixed(ADAM).init(PARAMS)
    assert_moved(found.opt_state.optimizer_state, fresh.optimizer_state)
    found = restored_with(steps, optax.sgd(0.1, momentum=0.9), "reset")
    assert found.report == (("0/trace/body/kernel", "0/trace/head"), ADAM_LEAVES, ())


def test_a_count_is_not_kept_without_its_moments(steps):
    """Moments in 16 bits become float32; those in 8 bits, and of another optimizer, start fresh with their count."""
    wide = restored_with(steps, optax.adam(1e-2, mu_dtype=jnp.bfloat16), "fit")
    assert wide.report == ((), (), ())
    found = restored_with(steps, optax.amsgrad(1e-2), "fit")
    assert set(ADAM_LEAVES) < set(found.report.fresh) and found.report.left_over == ()
    assert int(optax.tree.get(found.opt_state, "count")) == 0 and not np.any(
        optax.tree.get(found.opt_state, "mu")["head"]
    )


def test_lion_goes_on_with_the_average_of_gradients_that_adam_had(steps):
    """Its count and its `mu` are Adam's, as both average the gradients; the squares are left over."""
    found = restored_with(steps, optax.lion(1e-3), "fit")
    assert found.report == ((), ADAM_LEAVES[3:], ())
    assert_moved(moments(found.opt_state, "count", "mu"), moments(trained()[1], "count", "mu"))


def test_a_new_head_and_what_fits(steps):
    params = trained()[0] | {"head": jnp.ones((6, 10), jnp.bfloat16)}
    found = checkpoint.restore(steps, mixed(SCHEDULED), params=params, partial="head", moments="fit")
    assert found.report == (("head", "0/mu/head", "0/nu/head", "1/count"), (), ())
    assert_moved(optax.tree.get(found.opt_state, "mu")["body"], optax.tree.get(trained()[1], "mu")["body"])
    assert int(optax.tree.get_all_with_path(found.opt_state, "count")[0][1]) == 1


def test_another_word_for_moments_is_named(steps):
    with pytest.raises(ValueError, match="moments= is 'same', 'fit', 'reset'; got 'keep'"):
        checkpoint.restore(steps, mixed(ADAM), params=trained()[0], moments="keep")
