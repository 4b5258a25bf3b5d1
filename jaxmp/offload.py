"""Optimizer state, and layers, in the memory of the host.

With Adam a 16-bit parameter has 12 bytes of float32 beside it, master and moments, that nobody reads between two
updates. They can lie in the host's memory (pinned, so that the device copies from it on its own), and pass through the
device a few leaves at a time while they are updated:

    host:     master, moments ──copy in──> device: inner update, cast to the model's params ──copy out──> host

Where an array lies is part of its type in JAX, so nothing has to be told what is offloaded. `put` places the state,
`stream_updates` round the optimizer makes the update bring each leaf to the device and put it back where it came from,
and the state stays the plain arrays it was: the same tree, dtypes and shardings, one memory kind further away.

The update is a loop of no turn or one: a step that is skipped copies nothing, and leaves the host's arrays alone. In
the loop the leaves go in windows (see `_windows`), so that the device never holds more than a few of them. The
arithmetic is that of the optimizer on the device, which does it: FairScale and DeepSpeed's ZeRO-Offload run Adam on the
CPU instead, moving gradients and 16-bit params (4 bytes per parameter) rather than the state (24).

`stream_layers` does the same to the layers of a model, forward and backward.
"""

from jaxmp._src.memory.offload import (
    put as put,
    stream_updates as stream_updates,
    to_device as to_device,
    to_host as to_host,
)
from jaxmp._src.memory.stream_layers import stream_layers as stream_layers
