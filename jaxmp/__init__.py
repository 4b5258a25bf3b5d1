"""jaxmp: mixed-precision training for JAX, with float32 masters, loss scaling and any optax optimizer."""

from importlib import metadata as _metadata

from jaxmp import casting as casting
from jaxmp import checkpoint as checkpoint
from jaxmp import fp8 as fp8
from jaxmp import fsdp as fsdp
from jaxmp import linen as linen
from jaxmp import memory as memory
from jaxmp import monitor as monitor
from jaxmp import nnx as nnx
from jaxmp import offload as offload
from jaxmp._src.step.reload_masters import reload_master_params as reload_master_params
from jaxmp._src.step.policy_regions import autocast as autocast
from jaxmp._src.step.policy_regions import explain_autocast as explain_autocast
from jaxmp._src.autocast.rewrite import no_autocast as no_autocast
from jaxmp._src.porting.mmcv import auto_fp16 as auto_fp16
from jaxmp._src.porting.mmcv import force_fp32 as force_fp32
from jaxmp._src.numerics.scale_gradient import scale_gradient as scale_gradient
from jaxmp._src.devices.shardings import sharding_of as sharding_of
from jaxmp._src.numerics.softmax import softmax as softmax
from jaxmp._src.numerics.softmax import softmax_cross_entropy as softmax_cross_entropy
from jaxmp._src.transforms.clip import clip_by_global_norm as clip_by_global_norm
from jaxmp._src.transforms.clip import count_zeros as count_zeros
from jaxmp._src.transforms.clip import global_norm as global_norm
from jaxmp._src.transforms.compress import compress_moments as compress_moments
from jaxmp._src.transforms.ema import ema_params as ema_params
from jaxmp._src.transforms.ema import get_ema_params as get_ema_params
from jaxmp._src.transforms.fused import fused_adamw as fused_adamw
from jaxmp._src.transforms.fused import fused_lion as fused_lion
from jaxmp._src.transforms.fused import fused_sgd as fused_sgd
from jaxmp._src.porting.grad_scaler import GradScaler as GradScaler
from jaxmp._src.step.value_and_grad import value_and_grad as value_and_grad
from jaxmp._src.step.transform import keep_master_params as keep_master_params
from jaxmp._src.transforms.masterless import float32_moments as float32_moments
from jaxmp._src.transforms.masterless import stochastic_round_updates as stochastic_round_updates
from jaxmp._src.step.policy import Policy as Policy
from jaxmp._src.step.policy import get_policy as get_policy
from jaxmp._src.step.policy import weight_decay_mask as weight_decay_mask
from jaxmp._src.distributed.reduce import reduce_gradients as reduce_gradients
from jaxmp._src.loss_scale.dynamic import DynamicLossScale as DynamicLossScale
from jaxmp._src.loss_scale.static import NoOpLossScale as NoOpLossScale
from jaxmp._src.loss_scale.static import StaticLossScale as StaticLossScale
from jaxmp._src.step.shared_scale import shared_loss_scale as shared_loss_scale
from jaxmp._src.step.scale_reads import get_loss_scale as get_loss_scale
from jaxmp._src.step.state import get_master_params as get_master_params
from jaxmp._src.step.state import get_metrics as get_metrics
from jaxmp._src.step.state import keep_if_skipped as keep_if_skipped
from jaxmp._src.devices.collectives import all_finite as all_finite
from jaxmp._src.step.transform import apply_gradients as apply_gradients
from jaxmp._src.step.transform import mixed_precision as mixed_precision
from jaxmp._src.step.transform import unscale as unscale
from jaxmp._src.step.progress import TrainingStuck as TrainingStuck
from jaxmp._src.step.progress import check_progress as check_progress
from jaxmp._src.step.scale_reads import UnreadLossScale as UnreadLossScale
from jaxmp._src.step.transform import unscale_and_skip as unscale_and_skip

try:
    __version__ = _metadata.version("jaxmp")
except _metadata.PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0+unknown"
