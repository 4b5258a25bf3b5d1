"""Optimizer state and layers in host memory.

With Adam, a 16-bit parameter has a master and two moments in float32: 12 bytes that are used only in the update. They
can be stored in host memory, and be copied to the device a few leaves at a time during the update. The host memory is
pinned, so that the device can copy from it directly:

    host:     master, moments ──copy in──> device: inner update, cast to the model's params ──copy out──> host

In JAX the memory is part of an array's type, so no list of offloaded arrays is needed. `put` places the state.
`stream_updates` wraps the optimizer: its update copies each leaf to the device and back to the memory that it came
from. The state is still a tree of plain arrays, with the same structure, dtypes and shardings; only the memory kind
differs.

A skipped step copies nothing, and the arrays in host memory do not change. In other steps the leaves are updated in
windows, so that the device never has more than a few of them. The device does the arithmetic. FairScale and DeepSpeed's
ZeRO-Offload run Adam on the CPU instead: they move gradients and 16-bit params (4 bytes per parameter), and jaxmp moves
the state (24 bytes per parameter).

`stream_layers` does the same with the layers of a model, forward and backward.
"""

from jaxmp._src.memory.offload import (
    put as put,
    stream_updates as stream_updates,
    to_host as to_host,
)
from jaxmp._src.memory.stream_layers import stream_layers as stream_layers
