"""A warning names a line of the user's, whatever stands between that line and jaxmp, and is shown once for it."""

import inspect
import threading
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax.training import train_state

import jaxmp

PARAMS = {"w": jnp.ones((16, 16), jnp.float16)}


def half_loss(params):
    return jnp.sum(params["w"])


def through_nothing():
    jaxmp.fp8.DelayedScaling(interval=4)


def through_a_train_state():
    tx = jaxmp.mixed_precision(optax.sgd(0.1), jaxmp.get_policy("16-mixed", keep_fp32="no_such_layer"))
    train_state.TrainState.create(apply_fn=None, params=PARAMS, tx=tx)


def through_a_chain():
    tx = optax.chain(jaxmp.mixed_precision(optax.sgd(0.1), jaxmp.get_policy("16-mixed", keep_fp32="no_such_layer")))
    jax.eval_shape(tx.init, PARAMS)


def through_jit():
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init(PARAMS)
    jax.eval_shape(jaxmp.value_and_grad(half_loss), PARAMS, opt_state=opt_state)


def through_equinox():
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), "fp16").init(PARAMS)
    eqx.filter_jit(lambda p, s: jaxmp.value_and_grad(half_loss)(p, opt_state=s))(PARAMS, opt_state)


def through_a_with():
    # Lists that reached something once are silent from then on: these are of this test alone.
    with jaxmp.autocast(jnp.bfloat16, force_fp32=("tanh", "digamma", "lgamma")):
        pass


def through_a_thread():
    thread = threading.Thread(target=lambda: jaxmp.fp8.DelayedScaling(interval=4))
    thread.start()
    thread.join()


WAYS = [fn for name, fn in list(globals().items()) if name.startswith("through_")]


@pytest.mark.parametrize("way", WAYS, ids=lambda fn: fn.__name__.removeprefix("through_"))
def test_a_warning_names_the_line_of_the_user(way):
    with pytest.warns(UserWarning, match=r"docs/warnings\.md#") as seen:
        way()
    lines, first = inspect.getsourcelines(way)
    for warning in seen:
        assert (warning.filename, first <= warning.lineno < first + len(lines)) == (__file__, True), warning.lineno


def test_one_line_shows_a_warning_once():
    """With Python's own filters: the second line is another place to mend."""
    globals().pop("__warningregistry__", None)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        for _ in range(3):
            through_nothing()
        jaxmp.fp8.DelayedScaling(interval=4)
    assert len(seen) == 2


def test_code_without_a_name_is_the_users():
    with pytest.warns(UserWarning, match="interval=4") as seen:
        exec(compile("DelayedScaling(interval=4)", "a cell", "exec"), {"DelayedScaling": jaxmp.fp8.DelayedScaling})
    assert seen[0].filename == "a cell"
