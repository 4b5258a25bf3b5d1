"""Checkpoints: params and optimizer state, saved with Orbax and restored on another mesh or in another precision.

All state of jaxmp is plain arrays, so Orbax alone can save and restore it. `save` writes an ordinary Orbax checkpoint:
a step has the item `state`, a tree {"params", "opt_state", ...}, and the item `jaxmp`, a small JSON record of the
policy, the loss scale and the versions. This module adds what Orbax cannot know:

-   `restore` converts a checkpoint from other dtypes, other masters, with or without fp8 (see `convert`).
- `restore` compares the checkpoint with the model and the optimizer before it reads an array, and names the first leaf
  that does not fit. So a job continues with all of its state, or raises an error.
- The record holds a checksum of each leaf, which does not depend on the devices. `restore` verifies the checksums.

Saving is atomic and, by default, runs in the background: Orbax writes into a folder with a temporary name, and renames
the folder when it is complete and on the disk. If a process dies during a save, the newest checkpoint is the last
complete one. One process at a time saves into a directory. `save` copies the arrays before it returns, so the next step
may donate them.
"""

from jaxmp._src.checkpoint.convert import convert as convert
from jaxmp._src.checkpoint.flax_fp8 import import_flax_fp8 as import_flax_fp8
from jaxmp._src.checkpoint.foreign_loss_scales import (
    export_loss_scale as export_loss_scale,
    import_loss_scale as import_loss_scale,
    set_loss_scale as set_loss_scale,
)
from jaxmp._src.checkpoint.jobs import restore_job as restore_job, save_job as save_job
from jaxmp._src.checkpoint.megatron import export_megatron as export_megatron, import_megatron as import_megatron
from jaxmp._src.checkpoint.safetensors import (
    load_safetensors as load_safetensors,
    read_safetensors as read_safetensors,
    save_safetensors as save_safetensors,
)
from jaxmp._src.checkpoint.save_restore import (
    manager as manager,
    read_metadata as read_metadata,
    restore as restore,
    save as save,
)
from jaxmp._src.guard.new_params import reload_master_params as reload_master_params
