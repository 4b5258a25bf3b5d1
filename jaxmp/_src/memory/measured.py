"""The memory use of a device, from the counters of its allocator."""

from typing import Any, NamedTuple

import jax


class Measured(NamedTuple):
    """Memory use of a device in bytes; None for a counter that the allocator does not have.

    Attributes:
      in_use: bytes in use now.
      peak: the largest use in this process so far.
      limit: the most that the allocator may reserve.
      pool: bytes that the allocator has reserved on the device.
      fragmentation: the fraction of the free bytes in the pool outside its largest free block; 0 is best.

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
    """Reads the memory use of a device; None if its allocator does not count, as on CPU.

    The peak is that of the process. To compare a step with its plan, measure in a process that ran nothing larger.

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
