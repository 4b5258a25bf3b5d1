"""The transpose of a tile in registers, on warps of 32 lanes in NumPy: no interpreter of Pallas knows lanes."""

from typing import Any

import numpy as np
import pytest

from pallas_kernels import backend as backends, transposes

pytestmark = pytest.mark.skipif(backends.why_no_kernels() is not None, reason=str(backends.why_no_kernels()))
LANES = np.arange(32)


def permute(a: Any, b: Any, selector: Any) -> Any:
    """PTX's prmt.b32: nibble i of the selector is the number of the byte that becomes byte i."""
    numbers = np.broadcast_to(selector, 32)[:, None] >> (4 * np.arange(4)) & 15
    both = np.concatenate([x.view(np.uint8).reshape(32, 4) for x in (a, b)], axis=1)
    return np.take_along_axis(both, numbers, axis=1).copy().view(np.uint32)[:, 0]


WARP = transposes.Lanes(
    permute, lambda x, distance: x[LANES ^ distance], lambda bit, x: np.where(LANES & bit, x[1], x[0])
)


def places(layout: Any, shape: tuple[int, int]) -> np.ndarray:
    """[warp, lane, register, byte]: the number of the element that stands there, by the definition of the tiling."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.tiling.tiles:
        kept, cut = x.shape[: -len(tile)], x.shape[-len(tile) :]
        x = x.reshape(*kept, *(n for size, side in zip(cut, tile, strict=True) for n in (size // side, side)))
        outer = range(len(kept), x.ndim, 2)
        x = x.transpose(*range(len(kept)), *outer, *(axis + 1 for axis in outer))
    taken = [axis % x.ndim for axis in (*layout.warp_dims, *layout.lane_dims, layout.vector_dim)]
    registers = [axis for axis in range(x.ndim) if axis not in taken]
    return x.transpose(*taken[:-1], *registers, taken[-1]).reshape(4, 32, -1, 4)


@pytest.mark.parametrize("shape", [(64, 64), (64, 128), (128, 64)], ids=str)
def test_four_neighbours_of_a_column(shape):
    from jax.experimental.mosaic import gpu as mgpu

    x = np.random.default_rng(0).integers(0, 256, shape).astype(np.uint8)
    before = x.reshape(-1)[places(mgpu.WGMMA_LAYOUT_8BIT, shape)]
    after = x.T.reshape(-1)[places(transposes.layout().to_mgpu(), shape[::-1])]
    for warp in range(4):
        words = list(np.ascontiguousarray(before[warp].swapaxes(0, 1)).view(np.uint32)[..., 0])
        pairs = transposes.exchanged(list(zip(words[::2], words[1::2], strict=True)), WARP)
        registers = transposes.in_order([word for pair in pairs for word in pair], shape)
        np.testing.assert_array_equal(np.stack(registers).view(np.uint8).reshape(-1, 32, 4).swapaxes(0, 1), after[warp])
