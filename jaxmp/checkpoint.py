"""Checkpoints: params and optimizer state, saved with Orbax and restored on another mesh or in another precision.

All state of this library is plain arrays, so Orbax alone saves and restores it, and what is saved here is an ordinary
Orbax checkpoint: a step has the item `state`, a tree {"params", "opt_state", ...}, and the item `jaxmp`, a small JSON
that says what it was made with. This file adds what Orbax cannot know:

-   A checkpoint of a run with other dtypes, other masters, fp8 or none, is converted as it is read (`convert`).
-   Everything is compared with the model and the optimizer before an array is read; the first leaf that does not fit is
    named. A job goes on with all of its state or not at all.

Saving is atomic and, by default, in the background: Orbax writes into a folder with another name and renames it when
all is there. A process that dies while it saves leaves the last finished checkpoint behind as the newest. What is
saved is the state of the moment: the arrays are copied before `save` returns, and may be donated then.
"""

from jaxmp._src.checkpoint.convert import convert as convert, reload_master_params as reload_master_params
from jaxmp._src.checkpoint.flax_fp8 import import_flax_fp8 as import_flax_fp8
from jaxmp._src.checkpoint.loss_scales import (
    export_loss_scale as export_loss_scale,
    import_loss_scale as import_loss_scale,
    set_loss_scale as set_loss_scale,
)
from jaxmp._src.checkpoint.megatron import export_megatron as export_megatron, import_megatron as import_megatron
from jaxmp._src.checkpoint.safetensors import (
    load_safetensors as load_safetensors,
    read_safetensors as read_safetensors,
    save_safetensors as save_safetensors,
)
from jaxmp._src.checkpoint.save_restore import (
    Restored as Restored,
    describe as describe,
    manager as manager,
    read_metadata as read_metadata,
    restore as restore,
    save as save,
)
