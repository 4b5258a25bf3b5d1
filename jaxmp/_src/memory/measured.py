"""What a device has handed out, as its allocator counts it."""

from typing import Any, NamedTuple

import jax


class Measured(NamedTuple):
    """What the allocator of a device says, in bytes; None where it does not say it.

    Attributes:
      in_use: now.
      peak: the most so far in this process.
      limit: what it may take.
      pool: what it has taken from the device.
      fragmentation: of what is free in the pool, the part that is not in its largest block: 0 is best.

    Example:
      >>> found = Measured(in_use=2**20, peak=2**21, limit=2**30, pool=2**22, fragmentation=0.0)
      >>> found.peak / found.limit
      0.001953125
    """

    in_use: int
    peak: int
    limit: int | None
    pool: int | None
    fragmentation: float | None


def measured(device: Any = None) -> Measured | None:
    """What a device's allocator has handed out, or None where it keeps no account, as on CPU.

    The peak is that of the process: to hold a step against its plan, look in a process that has run nothing larger.

    Args:
      device: default: the first of `jax.local_devices()`.

    Example:
      >>> measured(jax.devices("cpu")[0]) is None
      True
    """
    stats = (device or jax.local_devices()[0]).memory_stats()
    if not stats or "bytes_in_use" not in stats:
        return None
    in_use, pool = stats["bytes_in_use"], stats.get("pool_bytes")
    free, largest = (pool or 0) - in_use, stats.get("largest_free_block_bytes", 0)
    fragmentation = 1 - largest / free if 0 < largest <= free else None
    peak = stats.get("peak_bytes_in_use", in_use)
    return Measured(in_use, peak, stats.get("bytes_limit"), pool or None, fragmentation)
