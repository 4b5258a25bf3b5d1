"""What a program for another platform computes, on the devices of the tests."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax

from pallas_kernels import by_platform


@contextlib.contextmanager
def ways_of(platform: str) -> Iterator[None]:
    """Programs for a CPU are lowered with the ways of `platform` ("cuda", "tpu"): XLA for CPU then compiles these.

    jax keeps what it has compiled: make each function that is run in here anew.
    """
    way = by_platform._way
    assert platform in by_platform.PLATFORMS
    with mock.patch.object(by_platform, "_way", lambda ways, name: way(ways, platform if name == "cpu" else name)):
        yield


def text_for(f: Callable[..., Any], *args: Any, platform: str = "cuda", **options: Any) -> str:
    """What `f` is lowered to for a platform, on a machine without one; `options` are those of `jax.jit`."""
    return jax.jit(f, **options).trace(*args).lower(lowering_platforms=(platform,)).as_text()
