"""Fully sharded data parallelism (FSDP): params are cut over devices and gathered where a layer needs them.

Each device of a mesh axis has one part of every large param, of its master and of its moments, and its own rows of the
batch. A step then has two kinds of communication:

    forward, backward   part --all-gather--> param          in the dtype of the model's computation, never the master
    backward            gradient --reduce-scatter--> part   the mean over devices, in a dtype that you choose

    def loss_fn(params, batch):
        params = jaxmp.fsdp.gather(params, layout)
        ...
    loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
    grads = jaxmp.fsdp.reduce_gradients(grads, layout)      # in shard_map: the mean of leaves that are not cut; float32

With `jax.checkpoint(loss_fn, policy=jaxmp.fsdp.save_all_but_gathered())`, gathered params are freed after the layer and
gathered again in the backward pass.

`gather` works in both kinds of step. Inside `jax.shard_map` it runs the two collectives above. Under plain `jax.jit`
with `NamedSharding` it sets the shardings, and XLA inserts the same collectives; XLA then sums the gradients in the
dtype that the backward pass computes them in.

A sum of float16 gradients can overflow where their mean does not. FSDP divides by about the square root of the number
of devices before the sum, and by the rest after it: `predivide`.
"""

from jaxmp._src.distributed.fsdp import (
    gather as gather,
    reduce_gradients as reduce_gradients,
    save_all_but_gathered as save_all_but_gathered,
)
from jaxmp._src.distributed.param_layout import (
    layout_of as layout_of,
    pad as pad,
    trim as trim,
)
