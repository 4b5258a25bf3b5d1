"""Looking at a run: where it is not finite, and why. Nothing here changes what a step computes.

`first_nonfinite` names the path and the index of the first inf or NaN of a tree. `first_bad_op` runs a function one
operation at a time and names the one at which finite numbers turned bad, with its layer, its line and its operands.
`capture` writes down a step that was skipped or spiked, which costs the step nothing, and `replay`, or
`python -m jaxmp replay`, runs it again alone: a fault of the machine does not come back, one of the numbers does.
"""

from jaxmp._bad_op import BadOp as BadOp, Operand as Operand
from jaxmp._capture import Capture as Capture, capture as capture, load_capture as load_capture
from jaxmp._nonfinite import NonFinite as NonFinite, first_nonfinite as first_nonfinite
from jaxmp._op_walk import first_bad_op as first_bad_op
from jaxmp._replay import Replay as Replay, Run as Run, replay as replay
