"""The bytes of a training step, before anything is allocated.

| question | call |
|---|---|
| How many bytes do params, masters, optimizer state and gradients take on a device? (from shapes) | `plan` |
| How many bytes does the whole step take, activations too? (compiled by XLA) | `compiled` |

Mixed precision does not reduce the bytes of a param (16 with Adam), and halves the activations, which are usually the
largest part: they grow with the batch. How many there are is XLA's choice, so only the compiled step has the number.
"""

from jaxmp._src.memory.compiled import compiled as compiled
from jaxmp._src.memory.plan import plan as plan
