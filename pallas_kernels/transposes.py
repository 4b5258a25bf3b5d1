"""The transpose of an fp8 tile, in registers.

A thread has four neighbours of a row of the tile in one register of 32 bits. For the transpose it needs four neighbours
of a column: one byte of its own, and one of three other lanes. Two exchanges move them, each between lanes that differ
in one bit of their number:

    rows  r, r + 2    lanes 8 apart    exchange half words       afterwards a byte is  (row / 2, column)
    rows  r, r + 1    lanes 4 apart    exchange every 2nd byte   afterwards a byte is  (row)

A lane sends half of a register, so one shuffle serves two registers, those of rows r and r + 8. The result has a
register layout of its own (`layout`): threads store four bytes at once, and from swizzled shared memory no two lanes of
a warp need the same bank, if one half of them stores row r + 8 first. Mosaic finds this order.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array


class Lanes(NamedTuple):
    """What a warp can do with registers of 32 bits; a test does the same in NumPy."""

    permute: Callable[[Any, Any, Any], Any]  # (a, b, selector): PTX's prmt; bytes 0 to 3 are of a, 4 to 7 of b
    shuffle: Callable[[Any, int], Any]  # (x, distance): x of the lane whose number differs in this bit
    choose: Callable[[int, tuple[int, int]], Any]  # (bit, (a, b)): b in lanes whose number has this bit, a in others


class Exchange(NamedTuple):
    """Selectors of `permute`, for lanes without and with the bit of `distance`."""

    distance: int
    sent: tuple[int, int]  # of both registers
    first: tuple[int, int]  # of the first register and what was received
    second: tuple[int, int]  # of the second one


EXCHANGES = (
    Exchange(8, sent=(0x7632, 0x5410), first=(0x5410, 0x3254), second=(0x7610, 0x3276)),
    Exchange(4, sent=(0x7531, 0x6420), first=(0x5240, 0x3514), second=(0x7260, 0x3716)),
)


def exchanged(pairs: list[tuple[Any, Any]], lanes: Lanes) -> list[tuple[Any, Any]]:
    """Pairs of registers of rows r and r + 8, with four neighbours of a row -> with four neighbours of a column."""
    for distance, *selectors in EXCHANGES:
        sent, first, second = (lanes.choose(distance, selector) for selector in selectors)
        received = [lanes.shuffle(lanes.permute(a, b, sent), distance) for a, b in pairs]
        pairs = [
            (lanes.permute(a, x, first), lanes.permute(b, x, second)) for (a, b), x in zip(pairs, received, strict=True)
        ]
    return pairs


def in_order(registers: list[Any], shape: tuple[int, int]) -> list[Any]:
    """Registers in the order of `layout`, from the order of WGMMA_8BIT for a tile of this shape."""
    rows, columns = shape[0] // 64, shape[1] // 16
    return [registers[2 * (i * columns + j) + k] for j in range(columns) for i in range(rows) for k in range(2)]


def layout() -> Any:
    """The layout of the result: a warp has 16 x 16 values, a thread four neighbours of two runs that are 8 apart."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import Tiling

    tiles = Tiling(((16, 64), (16, 16), (16, 8), (4, 4)))
    return plgpu.Layout.TILED(tiles, warp_dims=(-7,), lane_dims=(-3, -2, -4), vector_dim=-1)


def in_registers(x: Array, *, interpreted: bool) -> Array:
    """The transpose of an fp8 tile in the layout WGMMA_8BIT, in the layout `layout`."""
    if interpreted:
        return x.T
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from pallas_kernels.mosaic import FragmentedArray, arith, constant, ir, thread_idx, utils

    result = plgpu.ShapeDtypeStruct(x.shape[::-1], x.dtype, layout=layout())

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA_8BIT,), return_type=result)
    def turned_registers(_: Any, tile: Any) -> Any:
        i32 = ir.IntegerType.get_signless(32)

        def choose(bit: int, values: tuple[int, int]) -> Any:
            own = arith.andi(thread_idx(), constant(bit, i32))
            without = arith.cmpi(arith.CmpIPredicate.eq, own, constant(0, i32))
            return arith.select(without, *(constant(value, i32) for value in values))

        words = [utils.bitcast(register, i32) for register in tile.registers.reshape(-1)]
        lanes, kind = Lanes(utils.prmt, utils.shfl_bfly, choose), tile.registers.flat[0].type
        pairs = exchanged(list(zip(words[::2], words[1::2], strict=True)), lanes)
        new = result.layout.to_mgpu()
        registers = np.empty(new.registers_shape(result.shape), dtype=object)
        moved = in_order([word for pair in pairs for word in pair], tile.shape)
        registers.flat[:] = [utils.bitcast(word, kind) for word in moved]
        return FragmentedArray(_registers=registers, _layout=new, _is_signed=None)

    return turned_registers(x)  # type: ignore
