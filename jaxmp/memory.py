"""Plans the memory of a training step before anything is allocated.

A step has four kinds of arrays: params of the model, state of the optimizer (masters, moments), gradients, and the
activations that the forward pass stores for the backward pass. With P params, N activations and Adam, in bytes:

    float32             params 4P              gradients 4P   moments 8P   activations 4N      16P + 4N
    16-bit, masters     params 2P, masters 4P  gradients 2P   moments 8P   activations 2N      16P + 2N

So mixed precision does not reduce the sum of the first three, and halves the activations. The activations are usually
the largest part: N grows with the batch, P does not. Split masters and moments in fewer bits reduce the 16P
(`remainder_bits=` and `state_dtype=`).

`plan` counts the bytes for a model, an optimizer and a batch, from shapes alone. It has no tables of constants: params
are counted as the policy stores them, masters and moments as `optimizer.init` would return them, and gradients as
`jaxmp.value_and_grad` would. `plan` traces the loss and its gradient to find the activations: the values that XLA must
store between the passes, and the values that are alive at the moment of the largest use. On a mesh, `plan` counts the
part of each leaf that one device has.
"""

from jaxmp._src.memory.measured import measured as measured
from jaxmp._src.memory.plan import overview as overview, plan as plan, table as table
