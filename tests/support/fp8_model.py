"""A small plain model whose matmuls run in fp8, and the loops that train it: shared by the tests of fp8."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmp
from helpers import assert_close
from jaxmp._src.step import state as states
from jaxmp.fp8 import DelayedScaling, Scales
from regimes import guarded as guarded

SIDE = 16  # the least that an fp8 GEMM takes
RECIPE = DelayedScaling(amax_history_len=4)
LHS, RHS, GRAD = "fp8_lhs_e4m3_log2_scale", "fp8_rhs_e4m3_log2_scale", "fp8_grad_e5m2_log2_scale"
MATMUL = (((1,), (0,)), ((), ()))


def scale_leaves(shape: tuple[int, ...] = (), value: float = 0.0) -> dict[str, Any]:
    return {name: np.full(shape, value, np.float32) for name in (LHS, RHS, GRAD)}


def only_scales(layer: dict[str, Any]) -> dict[str, Any]:
    return {name: layer[name] for name in (LHS, RHS, GRAD)}


def only_amaxes(layer: dict[str, Any]) -> dict[str, Any]:
    """The amaxes in the gradients of a layer."""
    return jaxmp.fp8.get_amaxes({name: layer[name] for name in (LHS, RHS, GRAD)})


def weights(seed: int, *shape: int) -> Any:
    return np.asarray(np.random.default_rng(seed).normal(size=shape or (SIDE, SIDE)) / 4, np.float32)


def layer_params(seed: int) -> dict[str, Any]:
    return {"w": weights(seed)} | scale_leaves()


def model_params() -> dict[str, Any]:
    """Two fp8 layers with a norm between them, in float32."""
    return {"a": layer_params(1), "b": layer_params(2), "ln": {"scale": np.ones((1, SIDE), np.float32)}}


def matmul(layer: dict[str, Any], x: Any, recipe: Any = RECIPE) -> Any:
    """x w in fp8; its leaves may have other names than those of RECIPE."""
    scales = Scales(layer[LHS], layer[RHS], layer[GRAD]) if LHS in layer else None
    return jaxmp.fp8.dot_general(x, layer["w"], (((x.ndim - 1,), (0,)), ((), ())), recipe=recipe, scales=scales)


def model_loss(params: dict[str, Any], batch: dict[str, Any]) -> Any:
    x = batch["x"].astype(params["a"]["w"].dtype)
    h = jnp.tanh(matmul(params["a"], x)).astype(jnp.float32) * params["ln"]["scale"].astype(jnp.float32)
    y = matmul(params["b"], h.astype(x.dtype))
    return jnp.mean((y.astype(jnp.float32) - batch["y"]) ** 2)


def make_batch(seed: int, rows: int = 2 * SIDE) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {name: rng.normal(size=(rows, SIDE)).astype(np.float32) for name in ("x", "y")}


def make_tx(policy: str = "fp16", inner: Any = None, recipe: Any = RECIPE, **kwargs: Any) -> Any:
    inner = optax.adamw(1e-2, eps=1e-3) if inner is None else inner
    return jaxmp.mixed_precision(inner, policy, recipe=recipe, **kwargs)


def start(tx: Any, policy: str = "fp16", params32: Any = None) -> tuple[Any, Any]:
    """(params, opt_state)."""
    params32 = jax.tree.map(jnp.asarray, model_params() if params32 is None else params32)
    return jaxmp.get_policy(policy).cast_to_param(params32), tx.init(params32)


def make_step(tx: Any, loss_fn: Any = model_loss, reduce: Any = None, **kwargs: Any) -> Any:
    """A step as a user would write it for any optax optimizer: `(state, batch) -> (state, (loss, grads))`."""

    def step(state: Any, batch: Any) -> Any:
        params, opt_state = state
        loss, grads = jaxmp.value_and_grad(loss_fn, **kwargs)(params, batch, opt_state=opt_state)
        if reduce is not None:
            grads = reduce(grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), (loss, grads)

    return step


def fp8_state(opt_state: Any) -> states.Fp8State:
    (found,) = jaxmp._src.step.state.find(opt_state, states.Fp8State)
    return found


def histories(opt_state: Any) -> list[Any]:
    """The history of each group of scale leaves, float32[len, n], copies of pmap kept apart."""
    return [group.amax_history for group in fp8_state(opt_state).amax_states]


def assert_amaxes(actual: Any, expected: Any) -> None:
    """Amaxes of two programs agree: XLA may fuse what they are the amaxes of in two ways, some ulps apart."""
    assert_close(to_host(actual), to_host(expected), rtol=1e-5)


def to_host(tree: Any) -> Any:
    return jax.tree.map(np.asarray, tree)


def amaxes(grads: Any) -> dict[str, np.ndarray]:
    """The amaxes in a tree of gradients, by path."""
    return to_host(jaxmp.fp8.get_amaxes(grads))
