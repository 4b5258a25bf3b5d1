"""What to do next on this machine: the policy to begin with, and what is wrong with the installation."""

import shutil

import jax

from pallas_kernels import backend

_BLACKWELL, _ADA, _AMPERE = 10.0, 8.9, 8.0


def next_steps() -> list[str]:
    """Sentences for the user: the policy for the devices of this machine, and a GPU that jax does not see.

    Example:
      >>> print(*next_steps(), sep="\\n")  # on a CPU
      A CPU gains nothing from 16 bits: use it to try your code, with the policy that you will train with.
    """
    capability = backend.oldest_gpu()
    if capability is not None:
        return [_for_gpu(capability)]
    platform = jax.devices()[0].platform
    if platform == "tpu":
        return ['Begin with jaxmp.mixed_precision(tx, "bf16"). This TPU needs no loss scale.']
    steps = ["A CPU gains nothing from 16 bits: use it to try your code, with the policy that you will train with."]
    if platform == "cpu" and shutil.which("nvidia-smi"):
        steps.append(
            "An NVIDIA driver is installed, but jax has no GPU. Install its build for CUDA: pip install -U "
            "'jax[cuda13]' (driver 580 or newer, T4 or newer), else 'jax[cuda12]'."
        )
    return steps


def _for_gpu(capability: float) -> str:
    if capability < _AMPERE:
        return 'Begin with jaxmp.mixed_precision(tx, "fp16"): this GPU has tensor cores for float16, not for bfloat16.'
    if capability < _ADA:
        return 'Begin with jaxmp.mixed_precision(tx, "bf16"). It needs no loss scale. fp8 would be emulated here.'
    also = " The recipes MXFP8() and NVFP4() are for this GPU, too." if capability >= _BLACKWELL else ""
    return (
        'Begin with jaxmp.mixed_precision(tx, "bf16"). When it trains well, try "fp8", and measure: small layers gain '
        f"nothing.{also}"
    )
