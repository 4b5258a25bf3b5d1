"""Loss and gradients of a model under a policy, as a training step takes them: of linen and of nnx."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx

import jaxmp
from jaxmp._src.step import scale_reads


@contextlib.contextmanager
def nothing_read() -> Iterator[None]:
    """As if this process had read no loss scale; warnings are errors."""
    with mock.patch.object(scale_reads, "MEMORY", scale_reads.Reads()), warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "masters should start from float32 params")
        yield


def filled(make: Callable[..., Any], *args: Any) -> Any:
    """Variables as `make(*args)` would make them: of the usual size, and without a program that makes them."""

    def fill(path: Any, leaf: Any) -> Any:
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name in ("scale", "var"):
            return jnp.ones(leaf.shape)
        if name in ("bias", "mean") or jaxmp.fp8.is_scale(path):
            return jnp.zeros(leaf.shape)
        numbers = np.random.default_rng(leaf.size).normal(size=leaf.shape)
        return jnp.asarray(numbers / np.sqrt(np.prod(leaf.shape[:-1])), jnp.float32)

    shapes = jax.eval_shape(lambda *args: make(*args), *args)  # a new function: a region holds in a new trace only
    return jax.tree_util.tree_map_with_path(fill, shapes)


def linen_step(
    model: nn.Module, policy: jaxmp.Policy, loss_of: Any, x: Any, *, init: Any = None, **options: Any
) -> tuple[Any, Any, Any]:
    """float32 params, the optimizer's state, and `params -> (loss, gradients)` of `loss_of(model's output for x)`.

    `init` is that of the model, or of one with the same params. `options` are those of `jaxmp.mixed_precision`.
    """
    with jaxmp.autocast(policy):
        variables = dict(filled(init or model.init, jax.random.key(0), x))
    params = variables.pop("params")
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy, **options).init(params)

    def loss(params: Any, x: Any) -> Any:
        return loss_of(model.apply({"params": params} | variables, x, mutable=list(variables))[0])

    def step(params: Any) -> Any:
        return jaxmp.value_and_grad(loss, policy=policy)(policy.cast_to_param(params), x, opt_state=opt_state)

    return params, opt_state, step


def nnx_step(model: nnx.Module, policy: jaxmp.Policy, loss_of: Any, x: Any, **options: Any) -> tuple[Any, Any, Any]:
    """The same of an nnx model."""
    if policy.recipe is not None:
        jaxmp.nnx.to_fp8(model, policy.recipe)
    graphdef, state = nnx.split(model)
    params = nnx.as_pure(state)
    opt_state = jaxmp.mixed_precision(optax.sgd(0.1), policy, **options).init(params)

    def step(params: Any) -> Any:
        model = nnx.merge(graphdef, params)
        jaxmp.nnx.cast_to_param(model, policy)
        grad_fn = jaxmp.nnx.value_and_grad(lambda model: loss_of(model(x)), policy=policy)
        loss, grads = grad_fn(model, opt_state=opt_state)
        return loss, nnx.as_pure(grads)

    return params, opt_state, step
