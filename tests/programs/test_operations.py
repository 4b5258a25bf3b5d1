"""A function run with a look at its operations: the same results, and what was seen in calls, loops and branches."""

import jax
import jax.numpy as jnp
import numpy as np

from helpers import assert_close
from jaxmp._src.programs import operations

X = np.float32([[1.0, -2.0], [3.0, 0.5]])


def inner(c, x):
    with jax.named_scope("cell"):
        return jnp.sin(c) * x, jnp.max(x)


def program(x, n):
    with jax.named_scope("loop"):
        c, stacked = jax.lax.scan(inner, x[0], x)
    c = jax.lax.while_loop(lambda s: s[1] < n, lambda s: (s[0] * 10.0, s[1] + 1), (c * 0 + 1, 0))[0]
    c = jax.lax.cond(n > 2, lambda c: c * 100.0, lambda c: c - 1.0, c)
    c = jax.checkpoint(jax.jit(jnp.tanh))(c) + jnp.sum(jnp.ones(2) * 7.0)
    return jax.vmap(lambda a: a * 3.0)(c), stacked


def look_at(n):
    """What the operations give at most, by (primitive, path)."""
    look = operations.Look(lambda eqn, operands, results: jnp.max(jnp.abs(results[0].astype(jnp.float32)))[None])

    def run(x, n):
        return look.run(closed, (x, n)), look.found

    closed = jax.make_jaxpr(program)(X, n)
    results, found = jax.jit(run)(X, n)
    seen = {}
    for key, value in found.items():
        place = look.places[key]
        seen.setdefault((place.primitive, place.path), []).append(float(value[0]))
    return results, seen


def test_results_are_the_same_and_operations_are_seen_where_they_run():
    for n in (3, 1):
        results, seen = look_at(np.int32(n))
        assert_close(tuple(results), jax.jit(program)(X, np.int32(n)), rtol=1e-6)
        # In `while` and `cond` 10, 100, 1000, and this times 100; or 10, and at the end 3 (1 + 14).
        assert max(seen["mul", ""]) == (1e5 if n == 3 else 45.0)
        assert ("sin", "loop/cell") in seen and 0 < max(seen["sin", "loop/cell"]) <= 1
        # What is made of constants alone is not shown, nor a branch that was not taken.
        assert 7.0 not in seen["mul", ""] and (seen["sub", ""] == [0.0] if n == 3 else seen["sub", ""] == [9.0])


def test_the_backward_pass_is_told_apart():
    look = operations.Look(lambda eqn, operands, results: jnp.zeros(1))

    def loss(w):
        with jax.named_scope("layer"):
            return jnp.sum(jnp.tanh(X @ w))

    closed = jax.make_jaxpr(jax.grad(loss))(np.eye(2, dtype=np.float32))
    jax.eval_shape(lambda w: look.run(closed, (w,)), np.eye(2, dtype=np.float32))
    backward = {str(place) for place in look.places.values() if place.backward}
    assert any(text.startswith("dot_general in layer (backward)") for text in backward)
    assert any(not place.backward and place.path == "layer" for place in look.places.values())
