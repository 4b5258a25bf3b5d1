"""What a training step keeps in memory, planned before anything is allocated.

A step holds four things: what the model is (params), what the optimizer keeps (masters, moments), what comes back
(gradients), and what the forward pass leaves for the backward pass (activations). With P params, N activations and
Adam, in bytes:

    float32             params 4P              gradients 4P   moments 8P   activations 4N      16P + 4N
    16-bit, masters     params 2P, masters 4P  gradients 2P   moments 8P   activations 2N      16P + 2N

So mixed precision saves nothing on the first three, and half of the fourth, which is the most of it: N grows with the
batch, P does not. Split masters and moments in few bits then take the 16P down (`docs/how-to/precision/optimizers.md`).

`plan` counts all this for a model, an optimizer and a batch that are given as shapes. Nothing in it is a table: params
are what the policy stores, masters and moments are what `optimizer.init` would return, gradients what
`jaxmp.value_and_grad` would. Activations are read off the traced program of the loss and its gradient: which values XLA
has to store between the passes, and what is alive at the worst moment (`_buffers`). On a mesh, each leaf counts as the
part that one device holds.
"""

from jaxmp._src.memory.measured import Measured as Measured, measured as measured
from jaxmp._src.memory.plan import (
    Plan as Plan,
    beside_measured as beside_measured,
    overview as overview,
    plan as plan,
    table as table,
)
