"""Checkpoints: params and optimizer state, saved with Orbax, restored onto other devices, converted, exchanged.

All state of jaxmp is plain arrays, so Orbax saves and restores it: a step is an ordinary Orbax checkpoint. This module
adds what Orbax cannot know: the target of a restore, made from this model and this optimizer; an error by path where
the two differ, before an array is read; a digest of each leaf, so that no damaged file is restored in silence; and
`convert`, for another precision. Weights go in and out as safetensors files, loss scales and the state of Megatron-LM's
optimizer as their state dicts.
"""

from jaxmp._src.checkpoint.convert import convert as convert
from jaxmp._src.checkpoint.loss_scales import (
    export_loss_scale as export_loss_scale,
    import_loss_scale as import_loss_scale,
    set_loss_scale as set_loss_scale,
)
from jaxmp._src.checkpoint.megatron import import_megatron as import_megatron
from jaxmp._src.checkpoint.safetensors import load_safetensors as load_safetensors, save_safetensors as save_safetensors
from jaxmp._src.checkpoint.save_restore import (
    manager as manager,
    read_metadata as read_metadata,
    restore as restore,
    save as save,
)
