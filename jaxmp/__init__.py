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
from jaxmp._convert import reload_master_params as reload_master_params
from jaxmp._autocast import autocast as autocast
from jaxmp._autocast import no_autocast as no_autocast
from jaxmp._explain import explain_autocast as explain_autocast
from jaxmp._fake_quantize import fake_quantize as fake_quantize
from jaxmp._fp16_methods import auto_fp16 as auto_fp16
from jaxmp._fp16_methods import force_fp32 as force_fp32
from jaxmp._scale_gradient import scale_gradient as scale_gradient
from jaxmp._sharding_of import sharding_of as sharding_of
from jaxmp._softmax import log_softmax as log_softmax
from jaxmp._softmax import logsumexp as logsumexp
from jaxmp._softmax import softmax as softmax
from jaxmp._softmax import softmax_cross_entropy as softmax_cross_entropy
from jaxmp._suggest import Thresholds as Thresholds
from jaxmp._suggest import suggest_policy as suggest_policy
from jaxmp.clip import clip_by_global_norm as clip_by_global_norm
from jaxmp.clip import count_zeros as count_zeros
from jaxmp.clip import global_norm as global_norm
from jaxmp.compress import compress_moments as compress_moments
from jaxmp.ema import ema_params as ema_params
from jaxmp.ema import get_ema_params as get_ema_params
from jaxmp.fused import fused_adamw as fused_adamw
from jaxmp.fused import fused_lion as fused_lion
from jaxmp.fused import fused_sgd as fused_sgd
from jaxmp.grad_scaler import GradScaler as GradScaler
from jaxmp.grads import value_and_grad as value_and_grad
from jaxmp.master import keep_master_params as keep_master_params
from jaxmp.masterless import float32_moments as float32_moments
from jaxmp.masterless import stochastic_round_updates as stochastic_round_updates
from jaxmp.policy import Policy as Policy
from jaxmp.policy import get_policy as get_policy
from jaxmp.policy import weight_decay_mask as weight_decay_mask
from jaxmp.probe import check_optimizer as check_optimizer
from jaxmp.reduce import reduce_gradients as reduce_gradients
from jaxmp.scaling import DynamicLossScale as DynamicLossScale
from jaxmp.scaling import NoOpLossScale as NoOpLossScale
from jaxmp.scaling import StaticLossScale as StaticLossScale
from jaxmp.shared import shared_loss_scale as shared_loss_scale
from jaxmp.state import LossScaleState as LossScaleState
from jaxmp.state import MasterState as MasterState
from jaxmp.state import UnscaleState as UnscaleState
from jaxmp.state import get_loss_scale as get_loss_scale
from jaxmp.state import get_master_params as get_master_params
from jaxmp.state import get_metrics as get_metrics
from jaxmp.state import keep_if_skipped as keep_if_skipped
from jaxmp.sync import all_finite as all_finite
from jaxmp.transform import apply_gradients as apply_gradients
from jaxmp.transform import mixed_precision as mixed_precision
from jaxmp.transform import wrap_state as wrap_state
from jaxmp.unscale import TrainingStuck as TrainingStuck
from jaxmp.unscale import check_progress as check_progress
from jaxmp.unscale import unscale_and_skip as unscale_and_skip

try:
    __version__ = _metadata.version("jaxmp")
except _metadata.PackageNotFoundError:  # used from a source tree that was never installed
    __version__ = "0+unknown"
