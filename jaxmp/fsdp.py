"""Params cut over devices, gathered where a layer needs them: FSDP, by sharding.

Each device of a mesh axis keeps one part of every large param, of its master and of its moments, and its own rows of
the batch. A step then moves two things:

    forward, backward   part --all-gather--> param          in the dtype that the model computes in, never the master
    backward            gradient --reduce-scatter--> part   the mean over devices, in a dtype of your choice

    def loss_fn(params, batch):
        params = jaxmp.fsdp.gather(params, layout)
        ...
    loss, grads = jaxmp.value_and_grad(loss_fn)(params, batch, opt_state=opt_state)
    grads = jaxmp.fsdp.reduce_gradients(grads, layout)      # in shard_map: of what is not cut, the mean; all in float32

What was gathered is freed after the layer, and gathered again in the backward pass if the loss is wrapped in
`jax.checkpoint(loss_fn, policy=jaxmp.fsdp.save_all_but_gathered())`.

`gather` serves both ways of writing such a step. Inside of `jax.shard_map` it is the two collectives above. Under plain
`jax.jit` with `NamedSharding` it says how arrays lie, and XLA inserts the same collectives; the gradients are then
summed in the dtype in which the backward pass makes them.

A sum of float16 gradients overflows where their mean does not. FSDP's rule is to divide by about the square root of the
number of devices before the sum and by the rest after it: `predivide`.
"""

from jaxmp._src.distributed.fsdp import (
    gather as gather,
    reduce_gradients as reduce_gradients,
    save_all_but_gathered as save_all_but_gathered,
)
from jaxmp._src.distributed.param_layout import (
    Cut as Cut,
    Layout as Layout,
    layout_of as layout_of,
    pad as pad,
    trim as trim,
)
