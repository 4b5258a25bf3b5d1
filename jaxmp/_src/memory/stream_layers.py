"""Layers of a model in host memory, with one slice of layers at a time on the device.

A deep model repeats one function, `x = layer(params[i], x)`, and needs the params of only one layer at a time. So the
params are stacked, `[layers, ...]`, and stay in host memory. A `lax.scan` over slices copies each slice to the device
when it is needed:

    forward:   for each slice:            copy in its params -> x = slice(params, x), for each microbatch
    backward:  for each slice, reversed:  copy in its params again -> compute forward again from the x saved at its
                                          input -> gradients -> copy out the gradients of its params

`jax.checkpoint` around each slice gives this backward pass: it saves the input of the slice (on the device or in host
memory), but not the params and not the values inside the slice. In JAX, the gradient of an array in host memory is in
host memory too.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, PyTree

from jaxmp._src.base import tree_paths
from jaxmp._src.devices import host_memory
from jaxmp._src.numerics import casting

LayerFn = Callable[..., PyTree]


def stream_layers(
    layer_fn: LayerFn,
    *,
    num_slices: int | None = None,
    checkpoint_activations: bool = True,
    offload_activations: bool = False,
    num_microbatches: int = 1,
) -> Callable[..., PyTree]:
    """Makes a model of equal layers whose params may be in host memory, like FairScale's `OffloadModel`.

    Args:
      layer_fn: `(params of one layer, x, *args) -> x`; the result has the structure, shapes and dtypes of x.
      num_slices: the number of slices that the layers are cut into; it divides the number of layers. Slices are copied
        to the device one by one. None: one layer per slice. While one slice computes, XLA may copy the next one.
      checkpoint_activations: True: the backward pass computes each slice again from its input. False: the forward pass
        stores the results of matmuls on the device; the backward pass still copies the params again.
      offload_activations: whether the inputs of the slices are stored in host memory for the backward pass.
      num_microbatches: k; each slice computes the batch (the leading axis of `x`, which k divides) in k parts, one
        after the other, with one copy of its params. Part i has the rows i, i + k, i + 2k, ..., so that each device of
        a mesh has rows of every part. Only the activations of one part are on the device at a time. Gradients of the
        params are sums over the parts, in the params' dtype.

    Returns:
      `apply(params, x, *args) -> x`: params with leading axis [layers], in host memory (`jaxmp.offload.to_host`) or on
      the device; x a pytree of arrays on the device; each layer gets all of args. Differentiable; gradients of the
      params are in the memory of the params. Without microbatches it computes the same as a scan over the layers.

    Raises:
      ValueError: counts that are not positive ints; params without a common leading axis, or with one that `num_slices`
        does not divide; a batch that `num_microbatches` does not divide; `x` in host memory. Leaves are named by path.
      TypeError: `layer_fn` returns a result unlike x.

    Example:
      >>> layer = lambda w, x: jnp.tanh(x @ w)
      >>> params = host_memory.to_host(jnp.ones((6, 2, 2)) / 2)
      >>> apply = stream_layers(layer, num_slices=3)
      >>> gradient = jax.jit(jax.grad(lambda params: apply(params, jnp.ones((4, 2))).sum()))(params)
      >>> gradient.shape, gradient.sharding.memory_kind
      ((6, 2, 2), 'pinned_host')

    References:
      FairScale's `OffloadModel`; Pudipeddi et al. 2020, "Training Large Neural Networks with Constant Memory using a
      New Execution Algorithm" (arXiv 2002.05645); Chen et al. 2016, checkpointing (arXiv 1604.06174).
    """
    if num_slices is not None:
        _check_count("num_slices", num_slices)
    _check_count("num_microbatches", num_microbatches)
    policies = jax.checkpoint_policies
    policy = policies.nothing_saveable if checkpoint_activations else policies.dots_saveable

    def apply(params: PyTree, x: PyTree, *args: Any) -> PyTree:
        layers = _count_layers(params)
        slices = layers if num_slices is None else num_slices
        if layers % slices:
            raise ValueError(
                f"num_slices must divide the number of layers; got {slices} for {layers} layers. Divisors are "
                f"{', '.join(str(i) for i in range(1, layers + 1) if layers % i == 0)}."
            )
        _check_activations(x, num_microbatches)

        def one_layer(x: PyTree, layer: PyTree) -> tuple[PyTree, None]:
            new = layer_fn(layer, x, *args)
            _check_alike(new, x)
            return new, None

        def compute(layers: PyTree, x: PyTree) -> PyTree:
            return lax.scan(one_layer, x, layers)[0]

        def one_slice(host_layers: PyTree, x: PyTree) -> PyTree:
            with jax.named_scope("jaxmp.copy_in"):
                layers, x = host_memory.to_device((host_layers, x))
            if num_microbatches == 1:
                return compute(layers, x)
            part = jax.checkpoint(compute, policy=policy)
            return lax.map(lambda x: part(layers, x), x)

        checkpointed = jax.checkpoint(one_slice, policy=policy)

        def body(x: PyTree, host_layers: PyTree) -> tuple[PyTree, None]:
            if offload_activations:
                x = jax.tree.map(lambda x: _float_to_host(x) if casting.is_float(x) else host_memory.to_host(x), x)
            return checkpointed(host_layers, x), None

        cut = jax.tree.map(lambda p: p.reshape(slices, layers // slices, *p.shape[1:]), params)
        if num_microbatches > 1:
            # [n, ...] -> [k, n/k, ...], part i with the rows i, i + k, ...
            x = jax.tree.map(lambda x: x.reshape(-1, num_microbatches, *x.shape[1:]).swapaxes(0, 1), x)
        x, _ = lax.scan(body, x, cut)
        # The inverse: [k, n/k, ...] -> [n, ...].
        return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), x) if num_microbatches > 1 else x

    return apply


@jax.custom_vjp
def _float_to_host(x: Array) -> Array:
    """`x` in host memory; its gradient on the device."""
    return host_memory.to_host(x)


_float_to_host.defvjp(lambda x: (host_memory.to_host(x), None), lambda _, ct: (host_memory.to_device(ct),))


def _check_count(name: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int | np.integer) or count < 1:
        raise ValueError(f"{name} must be an int >= 1; got {count!r}")


def _count_layers(params: PyTree) -> int:
    sizes: dict[str, int] = {}
    for path, p in tree_paths.leaves_by_path(params).items():
        if jnp.ndim(p) == 0:
            raise ValueError(
                f"params of layers must be stacked, [layers, ...]; got a scalar at {path}. Write jax.tree.map(lambda "
                f"*ps: jnp.stack(ps), *layers)."
            )
        sizes[path] = p.shape[0]
    if len(set(sizes.values())) != 1:
        raise ValueError(
            f"params of layers must be stacked, [layers, ...], with one length; got "
            f"{', '.join(f'{n} at {path}' for path, n in sizes.items()) or 'no params'}"
        )
    return next(iter(sizes.values()))


def _check_activations(x: PyTree, num_microbatches: int) -> None:
    for path, leaf in tree_paths.leaves_by_path(x).items():
        if host_memory.is_on_host(leaf):
            raise ValueError(
                f"x must be in device memory; got host memory at {path} of x. Use jax.device_put(x, "
                f"jax.memory.Space.Device)."
            )
        if num_microbatches > 1 and (jnp.ndim(leaf) == 0 or leaf.shape[0] % num_microbatches):
            raise ValueError(
                f"num_microbatches must divide the first axis of x; got {num_microbatches} for shape {jnp.shape(leaf)} "
                f"at {path}. Pass other arrays after x."
            )


def _check_alike(new: PyTree, old: PyTree) -> None:
    if jax.tree.structure(new) != jax.tree.structure(old):
        raise TypeError(
            f"layer_fn must return a value like its x; it took x of structure {jax.tree.structure(old)} and returned "
            f"{jax.tree.structure(new)}"
        )
    for (path, n), o in zip(tree_paths.leaves_by_path(new).items(), jax.tree.leaves(old), strict=True):
        if jnp.shape(n) != jnp.shape(o) or jnp.result_type(n) != jnp.result_type(o):
            raise TypeError(
                f"layer_fn must return a value like its x; it took {jnp.result_type(o)}{list(jnp.shape(o))} and "
                f"returned {jnp.result_type(n)}{list(jnp.shape(n))} at {path}. Cast the result to x.dtype."
            )
