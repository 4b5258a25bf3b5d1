"""The kernels of a program that compute what they cast."""

import re

import jax


def computed_casts(f, *args, backward=False):
    """What each kernel of this kind reads in a program for an NVIDIA GPU: a list of types for each launch.

    The kernels of the forward pass, which cast to e4m3, or those of the gradients, which cast to e5m2.
    """
    text = jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    calls = [line for line in text.splitlines() if "@mosaic_gpu" in line and "computed_cast_transpose_amax" in line]
    types = [line.rsplit(" : ", 1)[1].split("->") for line in calls]
    return [re.findall(r"tensor<(\w+)>", reads) for reads, writes in types if ("f8E5M2" in writes) == backward]
