"""`jaxmp._buffers`: what lives when in small programs, counted by hand in float32 values of 4 bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jaxmp._src.memory import buffers

N = 64
W = jax.ShapeDtypeStruct((N, N), jnp.float32)
X = jax.ShapeDtypeStruct((N, N), jnp.float32)
VALUE = N * N * 4


def usage(f, *args, **kwargs):
    return buffers.usage(jax.make_jaxpr(f)(*args), **kwargs)


def of_gradient(f):
    """In values: (saved, kept) by the gradient of a sum of f(x, w) with respect to both."""
    found = usage(jax.value_and_grad(lambda x, w: jnp.sum(f(x, w)), argnums=(0, 1)), X, W)
    return found.saved / VALUE, found.kept / VALUE


def test_elementwise_chains_have_one_buffer():
    """sin(exp(x)) - x is one kernel, however long: nothing but its output."""
    found = usage(lambda x: jnp.sin(jnp.exp(x)) - x, X)
    assert (found.scratch, found.peak) == (0, VALUE)


def test_a_rounding_is_no_reduction():
    """reduce_precision is elementwise, as its name does not say."""
    found = usage(lambda x: jnp.sin(lax.reduce_precision(jnp.exp(x), 8, 7)) - x, X)
    assert (found.scratch, found.peak) == (0, VALUE)


def test_operands_and_results_of_matmuls_are_buffers():
    found = usage(lambda x, w: jnp.sum(jnp.tanh(jnp.sin(x) @ w)), X, W)
    assert found.scratch == found.peak == 2 * VALUE  # sin(x), while it is multiplied; the result, while it is summed


def test_casts_and_relus_of_stored_values_are_made_by_the_matmul_that_reads_them():
    found = usage(lambda x, w: jax.nn.relu(x @ w).astype(jnp.bfloat16) @ w.astype(jnp.bfloat16), X, W)
    assert found.scratch == VALUE  # x @ w


def test_a_convolution_reads_what_is_stored_where_a_matmul_reads_through_a_relu():
    image = jax.ShapeDtypeStruct((1, 8, 8, 4), jnp.float32)
    kernel = jax.ShapeDtypeStruct((3, 3, 4, 4), jnp.float32)

    def conv(x, w):
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def kept(multiply, x, w):
        f = jax.value_and_grad(lambda w, x: jnp.sum(multiply(jax.nn.relu(multiply(x, w)), w)))
        return usage(f, w, x).kept / buffers.nbytes(x)

    assert kept(conv, image, kernel) == 2  # before the relu, for its sign, and behind it
    assert kept(jnp.matmul, X, W) == 1


def test_what_is_cheap_is_recomputed_and_jax_would_save_it():
    """A chain of five: the backward pass reads each, and XLA makes them again from x @ w."""

    def f(x, w):
        y = x @ w
        for _ in range(5):
            y = jnp.sin(y)
        return y

    assert of_gradient(f) == (5, 1)


@pytest.mark.parametrize("costly", [jnp.tanh, lax.erf, lax.erfc])
def test_what_is_costly_is_not_computed_again_for_each_reader(costly):
    """XLA writes the tanh of a gelu once. It keeps it for the backward pass beside what it is computed from."""
    large = jax.ShapeDtypeStruct((512, 512), jnp.float32)

    def kept(f):
        def loss(x, w):
            return jnp.sum(f(x @ w) @ w)

        return usage(jax.value_and_grad(loss, argnums=(0, 1)), large, large).kept / buffers.nbytes(large)

    assert kept(lambda y: y * costly(y)) == kept(lambda y: y * jnp.abs(y)) + 1


def test_a_sigmoid_is_computed_again():
    """XLA keeps no sigmoid of a silu, in 16 or 32 bits."""
    large = jax.ShapeDtypeStruct((512, 512), jnp.float32)

    def loss(x, w):
        return jnp.sum(jax.nn.silu(x @ w) @ w)

    kept = usage(jax.value_and_grad(loss, argnums=(0, 1)), large, large).kept
    assert kept == 2 * buffers.nbytes(large)  # x @ w; the silu, an operand


def test_in_16_bits_the_factor_of_an_erfc_is_kept_with_it():
    """One kernel writes both, and the product: x / 2 of an exact gelu."""

    def kept(dtype):
        large = jax.ShapeDtypeStruct((512, 512), dtype)

        def loss(x, w):
            return jnp.sum((jax.nn.gelu(x @ w, approximate=False) @ w).astype(jnp.float32))

        return usage(jax.value_and_grad(loss, argnums=(0, 1)), large, large).kept / buffers.nbytes(large)

    assert kept(jnp.float32) == 3  # x @ w, the erfc, the gelu
    assert kept(jnp.bfloat16) == 4


@pytest.mark.parametrize(("readers", "stored"), [(2, 0), (3, 0), (4, 1)])
def test_a_sum_of_two_is_stored_if_that_moves_fewer_bytes(readers, stored):
    """n readers of a + b read 2 n values, or n and the sum, which reads two and writes one."""

    def f(a, b):
        y = a + b  # never an output
        return [jnp.sin(n * y) for n in range(1, readers + 1)]

    assert usage(f, X, W).scratch == stored * VALUE


def test_a_matmul_keeps_the_narrower_of_an_input_and_its_cast():
    """Of a batch in float32 the copy in 16 bits, for the gradient of the weights."""
    w = jax.ShapeDtypeStruct((N, N), jnp.bfloat16)

    def f(w, x):
        return jnp.sum((x.astype(jnp.bfloat16) @ w).astype(jnp.float32))

    assert usage(jax.value_and_grad(f), w, X).kept == VALUE // 2


def image(side, channels=4, dtype=jnp.float32):
    return jax.ShapeDtypeStruct((1, side, side, channels), dtype)


def conv(x, w, strides, padding="SAME"):
    return lax.conv_general_dilated(x, w, (strides, strides), padding, dimension_numbers=("NHWC", "HWIO", "NHWC"))


def test_a_convolution_with_unequal_padding_has_a_padded_copy_until_the_gradient_of_its_kernel():
    """3 x 3 with strides of 2: "SAME" pads (0, 1), and cuDNN pads (1, 1). A 1 x 1 beside it reads no copy."""
    x, w, one = image(8), *(jax.ShapeDtypeStruct((side, side, 4, 4), jnp.float32) for side in (3, 1))

    def of_gradient(f):
        return usage(jax.value_and_grad(lambda w, one, x: jnp.sum(f(w, one, x) ** 2), argnums=(0, 1)), w, one, x)

    def kept(f):
        return of_gradient(f).kept

    result, copy = buffers.nbytes(image(4)), buffers.nbytes(image(9))
    assert kept(lambda w, one, x: conv(x, w, 2)) == result + copy
    assert kept(lambda w, one, x: conv(x, w, 2, ((1, 1), (1, 1)))) == result
    assert of_gradient(lambda w, one, x: conv(x, w, 2)).saved == result  # JAX knows of no copy
    both = kept(lambda w, one, x: conv(jnp.exp(x), w, 2) * conv(jnp.exp(x), one, 2))
    assert both == 2 * result + copy + buffers.nbytes(x)


@pytest.mark.parametrize(("dtype", "bytes_kept"), [(jnp.float32, 16), (jnp.bfloat16, 8)], ids=["fp32", "bf16"])
def test_a_max_pool_keeps_coordinates_or_its_operand_for_its_gradient(dtype, bytes_kept):
    """For each maximum 4 coordinates in int32, or the 2 x 2 values that it is the maximum of: the smaller."""

    def kept(act):
        def f(x):
            y = lax.reduce_window(act(x), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
            return jnp.sum(y.astype(jnp.float32) ** 2)

        return usage(jax.value_and_grad(f), image(8, dtype=dtype)).kept

    maxima = 4 * 4 * 4
    pooled = maxima * jnp.dtype(dtype).itemsize
    assert kept(jnp.exp) == bytes_kept * maxima + pooled
    zeros = buffers.nbytes(image(8, dtype=dtype))
    assert kept(jax.nn.relu) == kept(jnp.exp) + zeros  # the relu compares with them, the gradient is added to them


def test_a_pad_is_one_buffer_however_often_it_is_written():
    def f(x, w, pads):
        padded = [jnp.pad(x, ((n, n), (0, 0))) for n in pads]
        return jnp.sum(padded[0].T @ padded[1])

    def scratch(*pads):
        return usage(lambda x, w: f(x, w, pads), X, W).scratch

    assert scratch(1, 1) == VALUE + (N + 2) * N * 4  # and the product
    assert scratch(0, 0) == VALUE


def test_what_is_computed_twice_is_computed_once():
    """As XLA does: a discriminator judges a made image for its own loss and, through a stop_gradient, for the other."""

    def kept(second):
        def loss(w, x):
            return jnp.sum(jnp.sin(x @ w) ** 2) + jnp.sum(jnp.cos(second(x) @ w) ** 2)

        return usage(jax.value_and_grad(loss), W, X).kept / VALUE

    assert kept(lambda x: x) == kept(lax.stop_gradient) == 1  # x @ w
    assert kept(lambda x: x + 1) == 3  # both products, and an operand
    again = jax.checkpoint(lambda x, w: jnp.sin(jnp.sin(x @ w) @ w))
    assert usage(jax.value_and_grad(lambda w, x: jnp.sum(again(x, w))), W, X).peak >= 3 * VALUE  # it computes again


def test_what_a_checkpoint_pads_again_is_padded_again():
    def f(x, w):
        return jnp.sum(jnp.pad(jnp.sin(x), ((1, 1), (0, 0))) @ w)

    plain, again = (usage(jax.value_and_grad(g, argnums=(0, 1)), X, W).kept for g in (f, jax.checkpoint(f)))
    assert again == 0 < plain


def test_views_are_the_same_bytes():
    def f(x, w):
        y = jnp.exp(x @ w)
        return y.reshape(N // 2, 2, N).transpose(1, 0, 2).reshape(N, N) @ w

    assert of_gradient(f)[0] == 1


def test_outputs_are_counted_at_the_peak_alone_and_by_their_share():
    def f(x, w):
        y = x @ w
        return y, jnp.sum(y @ w)

    assert usage(f, X, W).scratch == VALUE  # the second product
    assert usage(f, X, W).peak == 2 * VALUE  # y lives at the same time
    assert usage(f, X, W, output_bytes=[VALUE // 8, 4]).peak == VALUE + VALUE // 8


def test_what_reaches_no_output_is_nothing():
    def f(x, w):
        _ = jnp.sum(jnp.exp(x) @ w @ w)
        return jnp.sum(x)

    assert usage(f, X, W).peak == 4


def test_inputs_and_their_views_are_nobody_s_activations():
    assert of_gradient(lambda x, w: x.T @ w) == (0, 0)


@pytest.mark.parametrize("length", [1, 7])
def test_a_scan_stacks_what_it_saves_and_needs_one_turn_of_the_rest(length):
    def f(x, w):
        def turn(x, _):
            return jnp.sin(x @ w), None

        return lax.scan(turn, x, length=length)[0]

    saved, kept = of_gradient(f)
    assert kept == saved
    assert length <= saved <= 2 * length  # a carry and a cosine, of each turn
    peak = usage(lambda x, w: jnp.sum(f(x, w)), X, W).peak
    assert peak <= 4 * VALUE  # whatever the length


def test_a_branch_takes_what_its_dearest_takes():
    def f(x, w, i):
        return jnp.sum(lax.cond(i, lambda: jnp.sin(x @ w) @ w @ w, lambda: x))

    assert usage(f, X, W, jax.ShapeDtypeStruct((), bool)).peak >= 3 * VALUE
    assert usage(lambda x, w, i: jnp.sum(lax.cond(i, lambda: x + 1, lambda: x)), X, W, True).peak <= 2 * VALUE + 8


def test_a_while_is_one_turn():
    def f(x, w):
        return lax.fori_loop(0, 100, lambda _, x: jnp.sin(x @ w), x)

    assert VALUE <= usage(f, X, W).peak <= 4 * VALUE


def test_a_checkpoint_keeps_what_goes_in():
    def f(x, w):
        for _ in range(4):
            x = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x @ w) @ w))(x)
        return x

    assert of_gradient(f)[1] == 3  # x is an argument
    whole = usage(jax.grad(lambda x, w: jnp.sum(f(x, w))), X, W)
    assert whole.peak <= 8 * VALUE


def test_what_goes_into_a_checkpoint_is_stored_as_it_goes_in():
    """And not what it could be recomputed from: XLA may not look through."""

    def f(x, w, wrap):
        return wrap(lambda y: jnp.exp(jnp.exp(y)))(jnp.sin(x @ w))

    assert of_gradient(lambda x, w: f(x, w, lambda g: g))[1] == 1  # x @ w
    assert of_gradient(lambda x, w: f(x, w, jax.checkpoint))[1] == 2  # and its sine


def test_shard_map_is_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    f = jax.shard_map(lambda x, w: jnp.sin(x @ w) @ w, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"))
    assert usage(lambda x, w: jnp.sum(f(x, w)), X, W).peak <= 3 * VALUE // 8 + 4


def of_matmul(rows, length, columns, f=lambda x, w: x @ w, dtype=jnp.bfloat16):
    return usage(f, jax.ShapeDtypeStruct((rows, length), dtype), jax.ShapeDtypeStruct((length, columns), jnp.bfloat16))


def test_a_matmul_whose_odd_sum_is_split_has_padded_copies():
    """XLA splits the sum where the result has fewer tiles of 128 x 128 than the GPU has cores: 16 here, then 256."""
    assert of_matmul(512, 512, 512).scratch == 0
    assert of_matmul(512, 511, 512).scratch == 2 * 512 * 512 * 2  # of both operands
    assert of_matmul(511, 512, 511).scratch == 0  # its sum is aligned
    assert of_matmul(2048, 511, 2048).scratch == 0


def test_a_cast_and_a_padded_copy_of_it_are_made_from_one_value():
    """As the gradient of logits in float32: a cast for one matmul, its padded copy for another, whose sum is split."""

    def f(x, w):
        g = jnp.cumsum(x, axis=1)  # a buffer in float32
        low = g.astype(jnp.bfloat16)
        return low @ w, low.T @ low

    g, low, padded, w_padded = 512 * 511 * 4, 512 * 511 * 2, 512 * 512 * 2, 512 * 512 * 2
    assert of_matmul(512, 511, 512, f, jnp.float32).scratch == g + low + padded + w_padded


def test_a_matmul_in_fp8_has_the_workspace_of_cublas():
    def scratch(dtype):
        x = jax.ShapeDtypeStruct((N, N), dtype)
        return usage(lambda x: jnp.matmul(x, x, preferred_element_type=jnp.float32), x).scratch

    assert scratch(jnp.float8_e4m3fn) == scratch(jnp.bfloat16) + 4 * 2**20


def test_bytes_are_those_of_arrays():
    for x in (np.ones((3, 2), np.int8), jnp.ones(5, jnp.bfloat16), jax.random.key(0)):
        assert buffers.nbytes(x) == x.nbytes
    assert buffers.nbytes(3.0) == 0
