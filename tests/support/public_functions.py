"""Public functions of jax.numpy, jax.nn, jax.lax and jax.scipy, with arguments that they are defined and smooth for.

`FUNCTIONS[name]` is `(function, kinds of its arguments)`; `arguments(kinds)` makes them. A kind is a letter:

    x  float [4, 8], within [-2, 2]     p  float [4, 8], positive       u  float [4, 8], within (0, 1)
    v  float [8]                        b  float [], positive           g  float [4, 8], above 1
    m  float [8, 8], well conditioned   s  float [8, 8], symmetric and positive definite
    w  float [8, 8]                     k  float [3]                    n  int [4, 8], from 0 to 7
    t  float [2, 8, 8]                  h  float [2, 6, 2, 4], as attention has it
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy as jsp
import numpy as np
from jax import lax, nn

Function = Callable[..., Any]


def arguments(kinds: str, seed: int = 0) -> list[np.ndarray]:
    """float32 and int32 arrays; floats of float16's and bfloat16's precision, so that a cast does not change them."""
    rng = np.random.default_rng(seed)
    made = {
        "x": lambda: rng.uniform(-2, 2, (4, 8)),
        "p": lambda: rng.uniform(0.25, 2.5, (4, 8)),
        "u": lambda: rng.uniform(0.1, 0.9, (4, 8)),
        "g": lambda: rng.uniform(1.25, 3.0, (4, 8)),
        "v": lambda: rng.uniform(-2, 2, 8),
        "b": lambda: rng.uniform(0.5, 2.0, ()),
        "k": lambda: rng.uniform(-1, 1, 3),
        "m": lambda: np.eye(8) * 2 + rng.uniform(-0.2, 0.2, (8, 8)),
        "s": lambda: np.diag(np.arange(1.0, 5.0, 0.5)) + 0.0625 * np.eye(8)[::-1],
        "w": lambda: rng.uniform(-1, 1, (8, 8)),
        "t": lambda: rng.uniform(-1, 1, (2, 8, 8)),
        "h": lambda: rng.uniform(-1, 1, (2, 6, 2, 4)),
        "n": lambda: rng.integers(0, 8, (4, 8)),
    }
    out = []
    for kind in kinds:
        value = np.asarray(made[kind]())
        is_int = value.dtype.kind == "i"
        out.append(value.astype(np.int32) if is_int else np.asarray(jnp.asarray(value, jnp.bfloat16), np.float32))
    return out


FUNCTIONS: dict[str, tuple[Function, str]] = {}


def _add(module: Any, prefix: str, kinds: str, names: str, wrap: Callable[[Function], Function] = lambda f: f) -> None:
    """The functions of these names, each in `wrap`; a version of jax may lack some."""
    for name in names.split():
        if hasattr(module, name):
            FUNCTIONS[f"{prefix}.{name}"] = wrap(getattr(module, name)), kinds


def _with(*more: Any) -> Callable[[Function], Function]:
    """Calls a function with more arguments behind its own."""
    return lambda f: lambda *args: f(*args, *more)


OF_ONE_ARRAY = """
    abs absolute all amax amin angle any arcsinh arctan argmax argmin argsort around array asarray atan asinh
    atleast_1d atleast_2d atleast_3d average cbrt ceil conj conjugate copy corrcoef cos cosh count_nonzero cov
    cumprod cumsum deg2rad degrees diag diagonal diff ediff1d exp exp2 expm1 fabs flip fliplr flipud floor frexp imag
    isfinite isinf isnan isneginf isposinf isreal max mean median min modf nan_to_num nanargmax nanargmin nancumprod
    nancumsum nanmax nanmean nanmedian nanmin nanprod nanstd nansum nanvar negative ones_like positive prod ptp rad2deg
    radians ravel real rint rot90 round sign signbit sin sinc sinh sort square squeeze std sum tan tanh trace transpose
    trapezoid tril triu trunc unwrap var zeros_like matrix_transpose
"""
OF_TWO_ARRAYS = """
    add subtract multiply divide true_divide maximum minimum fmax fmin arctan2 atan2 copysign equal greater
    greater_equal less less_equal not_equal hypot logaddexp logaddexp2 fmod mod remainder floor_divide divmod
    nextafter heaviside isclose allclose array_equal append vecdot
"""
ACTIVATIONS = """
    relu relu6 sigmoid softplus soft_sign silu swish log_sigmoid leaky_relu hard_sigmoid hard_silu hard_swish
    hard_tanh tanh elu celu selu gelu glu squareplus mish softmax log_softmax logsumexp standardize
    sparse_plus sparse_sigmoid identity
"""
OF_LAX = """
    abs asinh atan bessel_i0e bessel_i1e cbrt ceil cos cosh erf erfc exp exp2 expm1 floor is_finite logistic neg
    round sign sin sinh square tan tanh stop_gradient sort
"""
_add(jnp, "jnp", "x", OF_ONE_ARRAY)
_add(jnp, "jnp", "p", "sqrt reciprocal log log10 log1p log2 i0 signbit")
_add(jnp, "jnp", "u", "acos asin arccos arcsin arctanh atanh")
_add(jnp, "jnp", "g", "acosh arccosh")
_add(jnp, "jnp", "xp", OF_TWO_ARRAYS)
_add(jnp, "jnp", "px", "power float_power pow")
_add(jnp, "jnp", "ww", "matmul dot inner outer kron vdot tensordot")
_add(jnp, "jnp", "wv", "matvec")
_add(jnp, "jnp", "vw", "vecmat")
_add(jnp, "jnp", "vk", "convolve correlate polyadd polysub polymul")
_add(jnp, "jnp", "kv", "polyval")
_add(jnp, "jnp", "v", "polyder polyint diagflat")
_add(nn, "nn", "x", ACTIVATIONS)
_add(nn, "nn", "p", "log1mexp")
_add(lax, "lax", "x", OF_LAX)
_add(lax, "lax", "p", "digamma lgamma log log1p rsqrt sqrt reciprocal")
_add(lax, "lax", "u", "acos asin atanh erf_inv")
_add(lax, "lax", "g", "acosh")
_add(lax, "lax", "xp", "add sub mul div rem max min atan2 eq ne lt le gt ge nextafter")
_add(lax, "lax", "px", "pow")
_add(lax, "lax", "pp", "igamma igammac random_gamma_grad")
_add(lax, "lax", "ww", "dot")
_add(lax, "lax", "tt", "batch_matmul")
_add(jsp.special, "special", "x", "erf erfc expit i0 i0e i1 i1e log_ndtr ndtr")
_add(jsp.special, "special", "p", "digamma gamma gammaln gammasgn entr exp1 expi factorial")
_add(jsp.special, "special", "u", "logit ndtri erfinv spence")
_add(jsp.special, "special", "pp", "beta betaln gammainc gammaincc kl_div rel_entr xlog1py xlogy poch")
_add(jsp.special, "special", "gp", "zeta")
_add(jsp.special, "special", "x", "logsumexp softmax log_softmax")
_add(jsp.stats.norm, "stats.norm", "x", "pdf logpdf cdf logcdf sf logsf")
_add(jsp.stats.norm, "stats.norm", "u", "ppf isf")
_add(jsp.stats.logistic, "stats.logistic", "x", "pdf logpdf cdf sf")
_add(jsp.stats.laplace, "stats.laplace", "x", "pdf logpdf cdf")
_add(jsp.stats.cauchy, "stats.cauchy", "x", "pdf logpdf cdf logcdf sf logsf")
_add(jsp.stats.expon, "stats.expon", "p", "pdf logpdf cdf")
_add(jsp.stats.uniform, "stats.uniform", "u", "pdf logpdf cdf")
_add(jsp.stats.gumbel_r, "stats.gumbel_r", "x", "pdf logpdf cdf")
_add(jsp.stats.gamma, "stats.gamma", "pp", "pdf logpdf cdf")
_add(jsp.stats.t, "stats.t", "xp", "pdf logpdf")
_add(jsp.stats.chi2, "stats.chi2", "pp", "pdf logpdf cdf")
_add(jsp.stats.pareto, "stats.pareto", "gp", "pdf logpdf cdf")
_add(jsp.linalg, "linalg", "m", "det expm inv")
_add(jsp.linalg, "linalg", "s", "cholesky eigh svd")
_add(jsp.linalg, "linalg", "v", "toeplitz")
_add(jnp.linalg, "jnp.linalg", "m", "det inv norm pinv slogdet matrix_norm")
_add(jnp.linalg, "jnp.linalg", "s", "cholesky eigvalsh svdvals")
_add(jnp.linalg, "jnp.linalg", "ww", "matmul tensordot vecdot")
_add(jnp.linalg, "jnp.linalg", "vv", "outer")
_add(jnp.linalg, "jnp.linalg", "x", "vector_norm matrix_transpose diagonal trace")

_add(jnp, "jnp", "xp", "concatenate stack hstack vstack dstack column_stack", lambda f: lambda x, y: f([x, y]))
_add(jnp, "jnp", "x", "split hsplit ldexp pad", _with(2))
_add(jnp, "jnp", "x", "swapaxes moveaxis", _with(0, 1))
_add(jnp, "jnp", "x", "cumulative_sum cumulative_prod", lambda f: lambda x: f(x, axis=1))
_add(jnp, "jnp", "x", "quantile nanquantile", lambda f: lambda x: f(x, 0.3, axis=1))
_add(jnp, "jnp", "x", "percentile nanpercentile", lambda f: lambda x: f(x, 30.0, axis=1))
_add(lax, "lax", "x", "rev reduce_max reduce_min reduce_sum reduce_prod expand_dims", _with((1,)))
_add(lax, "lax", "x", "cumsum cumprod cummax cummin cumlogsumexp", _with(1))
_add(nn, "nn", "x", "logsumexp logmeanexp", _with(1))
_add(jsp.stats, "stats", "x", "rankdata sem", lambda f: lambda x: f(x, axis=1))

_MASK = np.arange(32).reshape(4, 8) % 3 > 0
_ROWS = np.array([0, 2, 1, 3], np.int32)
FUNCTIONS |= {
    "jnp.gradient": (lambda x: jnp.stack(jnp.gradient(x)), "x"),
    "jnp.where": (lambda x, y: jnp.where(_MASK, x, y), "xp"),
    "jnp.where constant": (lambda x: jnp.where(_MASK, x, -1.0), "x"),
    "jnp.select": (lambda x, y: jnp.select([_MASK, ~_MASK], [x, y]), "xp"),
    "jnp.piecewise": (lambda x: jnp.piecewise(x, [x < 0, x >= 0], [lambda x: -x, lambda x: x * 2]), "x"),
    "jnp.clip": (lambda x: jnp.clip(x, -1.0, 1.0), "x"),
    "jnp.block": (lambda x, y: jnp.block([[x, y], [y, x]]), "xp"),
    "jnp.array_split": (lambda x: jnp.array_split(x, 3), "x"),
    "jnp.reshape": (lambda x: jnp.reshape(x, (8, 4)), "x"),
    "jnp.expand_dims": (lambda x: jnp.expand_dims(x, 1), "x"),
    "jnp.broadcast_to": (lambda x: jnp.broadcast_to(x, (2, 4, 8)), "x"),
    "jnp.tile": (lambda x: jnp.tile(x, (2, 1)), "x"),
    "jnp.repeat": (lambda x: jnp.repeat(x, 2, 0), "x"),
    "jnp.roll": (lambda x: jnp.roll(x, 3, 1), "x"),
    "jnp.pad reflect": (lambda x: jnp.pad(x, 2, "reflect"), "x"),
    "jnp.take": (lambda x: jnp.take(x, _ROWS, 0), "x"),
    "jnp.take_along_axis": (lambda x, n: jnp.take_along_axis(x, n, 1), "xn"),
    "jnp.put_along_axis": (lambda x, n: jnp.put_along_axis(x, n[:, :1], 1.0, 1, inplace=False), "xn"),
    "jnp.insert": (lambda x: jnp.insert(x, 1, 5.0, 0), "x"),
    "jnp.delete": (lambda x: jnp.delete(x, 1, 0), "x"),
    "jnp.searchsorted": (lambda v, x: jnp.searchsorted(jnp.sort(v), x), "vx"),
    "jnp.digitize": (lambda x: jnp.digitize(x, np.linspace(-2, 2, 5)), "x"),
    "jnp.histogram": (lambda x: jnp.histogram(x, 4, (-2, 2))[0], "x"),
    "jnp.bincount": (lambda n, x: jnp.bincount(n.ravel(), x.ravel(), length=8), "nx"),
    "jnp.interp": (lambda x, v: jnp.interp(x, np.linspace(-2, 2, 8), v), "xv"),
    "jnp.partition": (lambda x: jnp.partition(x, 2, 1)[:, 2], "x"),
    "jnp.top_k": (lambda x: lax.top_k(x, 3)[0], "x"),
    "jnp.lexsort": (lambda x: jnp.lexsort((x[0], x[1])), "x"),
    "jnp.einsum": (lambda a, b: jnp.einsum("ij,jk->ik", a, b), "ww"),
    "jnp.einsum outer": (lambda a, b: jnp.einsum("i,j->ij", a, b), "vv"),
    "jnp.einsum trace": (lambda a, b: jnp.einsum("ij,ji->", a, b), "ww"),
    "jnp.einsum batched": (lambda a, b: jnp.einsum("bij,bjk->bik", a, b), "tt"),
    "jnp.choose": (lambda n, x, y: jnp.choose(n % 2, [x, y], mode="clip"), "nxp"),
    "jnp.cross": (lambda x, y: jnp.cross(x[:, :3], y[:, :3]), "xp"),
    "jnp.vander": (lambda v: jnp.vander(v, 3), "v"),
    "jnp.apply_along_axis": (lambda x: jnp.apply_along_axis(jnp.cumsum, 1, x), "x"),
    "jnp.apply_over_axes": (lambda x: jnp.apply_over_axes(jnp.sum, x, [0]), "x"),
    "jnp.vectorize": (lambda x: jnp.vectorize(lambda r: r * r.sum(), signature="(n)->(n)")(x), "x"),
    "jnp.fft": (lambda x: jnp.abs(jnp.fft.rfft(x)), "x"),
    "jnp.at.set": (lambda x, y: x.at[_ROWS[:2]].set(y[:2]), "xp"),
    "jnp.at.add": (lambda x, y: x.at[_ROWS[:2]].add(y[:2]), "xp"),
    "jnp.at.multiply": (lambda x, y: x.at[_ROWS[:2]].multiply(y[:2], unique_indices=True), "xp"),
    "jnp.at.max": (lambda x, y: x.at[_ROWS[:2]].max(y[:2]), "xp"),
    "jnp.at.apply": (lambda x: x.at[_ROWS[:2]].apply(jnp.sin), "x"),
    "jnp.at.get": (lambda x: x.at[_ROWS].get(), "x"),
    "jnp.permute_dims": (lambda x: jnp.permute_dims(x, (1, 0)), "x"),
    "jnp.tri": (lambda x: x * jnp.tri(4, 8), "x"),
    "jnp.meshgrid": (lambda v: jnp.stack(jnp.meshgrid(v, v)), "v"),
    "jnp.ix_": (lambda x: x[jnp.ix_(_ROWS, _ROWS)], "x"),
    "jnp.linspace": (lambda b: jnp.linspace(0.0, b, 5), "b"),
    "jnp.geomspace": (lambda b: jnp.geomspace(1.0, 1.0 + b, 5), "b"),
    "jnp.logspace": (lambda b: jnp.logspace(0.0, b, 5), "b"),
    "jnp.full_like": (lambda x, b: jnp.full_like(x, b), "xb"),
    "jnp.nan_to_num nan": (lambda x: jnp.nan_to_num(jnp.where(_MASK, x, jnp.nan)), "x"),
    "nn.softmax where": (lambda x: nn.softmax(x, where=_MASK), "x"),
    "nn.log_softmax masked": (lambda x: jnp.where(_MASK, nn.log_softmax(jnp.where(_MASK, x, -jnp.inf)), 0.0), "x"),
    "nn.one_hot": (lambda n, w: nn.one_hot(n, 8) @ w, "nw"),
    "nn.gelu exact": (lambda x: nn.gelu(x, approximate=False), "x"),
    "nn.dot_product_attention": (lambda q, k, v: nn.dot_product_attention(q, k, v, is_causal=True), "hhh"),
    "nn.initializers": (lambda x: x * nn.initializers.ones(jax.random.key(0), (4, 8)), "x"),
    "lax.clamp": (lambda x: lax.clamp(-1.0, x, 1.0), "x"),
    "lax.integer_pow": (lambda x: lax.integer_pow(x, 3), "x"),
    "lax.select": (lambda x, y: lax.select(jnp.asarray(_MASK), x, y), "xp"),
    "lax.concatenate": (lambda x, y: lax.concatenate([x, y], 0), "xp"),
    "lax.pad": (lambda x, b: lax.pad(x, b, [(1, 1, 0), (0, 0, 1)]), "xb"),
    "lax.slice": (lambda x: lax.slice(x, (1, 2), (3, 8)), "x"),
    "lax.dynamic_slice": (lambda x, n: lax.dynamic_slice(x, (n[0, 0] % 3, 0), (2, 8)), "xn"),
    "lax.dynamic_update_slice": (lambda x, y, n: lax.dynamic_update_slice(x, y[:2], (n[0, 0] % 3, 0)), "xpn"),
    "lax.dynamic_index_in_dim": (lambda x, n: lax.dynamic_index_in_dim(x, n[0, 0] % 4), "xn"),
    "lax.gather": (lambda x: x[_ROWS, _ROWS], "x"),
    "lax.argmax": (lambda x: lax.argmax(x, 1, jnp.int32), "x"),
    "lax.sort_key_val": (lambda x, y: lax.sort_key_val(x, y)[1], "xp"),
    "lax.reduce_window": (lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), "x"),
    "lax.reduce_window sum": (lambda x: lax.reduce_window(x, 0.0, lax.add, (1, 2), (1, 2), "VALID"), "x"),
    "lax.reduce": (lambda x: lax.reduce(x, 0.0, lax.add, (1,)), "x"),
    "lax.conv": (lambda t, w: lax.conv(t[None], jnp.stack([w[:3, :3], w[3:6, :3]])[None], (1, 1), "SAME"), "tw"),
    "lax.conv_general_dilated": (
        lambda t, w: lax.conv_general_dilated(t, w[:, :, None], (1,), "SAME", dimension_numbers=("NCH", "OIH", "NCH")),
        "tw",
    ),
    "lax.conv_transpose": (lambda t, w: lax.conv_transpose(t, w[None], (2,), "SAME"), "tw"),
    "lax.dot_general": (lambda a, b: lax.dot_general(a, b, (((2,), (1,)), ((0,), (0,)))), "tt"),
    "lax.map": (lambda x: lax.map(lambda r: jnp.tanh(r) * r.sum(), x), "x"),
    "lax.associative_scan": (lambda x: lax.associative_scan(jnp.add, x), "x"),
    "lax.fori_loop": (lambda x, w: lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ w), x), "xw"),
    "lax.switch": (lambda x, n: lax.switch(n[0, 0] % 2, [jnp.sin, jnp.cos], x), "xn"),
    "lax.reduce_precision": (lambda x: lax.reduce_precision(x, 8, 7), "x"),
    "lax.regularized incomplete beta": (lambda a, b, u: lax.betainc(a, b, u), "ppu"),
    "lax.polygamma": (lambda p: lax.polygamma(jnp.ones_like(p), p), "p"),
    "lax.linalg.triangular_solve": (lambda m, w: lax.linalg.triangular_solve(m, w, left_side=True, lower=True), "mw"),
    "special.betainc": (jsp.special.betainc, "ppu"),
    "special.polygamma": (lambda p: jsp.special.polygamma(1, p), "p"),
    "special.multigammaln": (lambda g: jsp.special.multigammaln(g, 2), "g"),
    "special.hyp1f1": (lambda u: jsp.special.hyp1f1(1.5, 2.5, u), "u"),
    "special.expn": (lambda p: jsp.special.expn(2, p), "p"),
    "special.logsumexp weighted": (lambda x, p: jsp.special.logsumexp(x, 1, b=p), "xp"),
    "stats.beta": (jsp.stats.beta.logpdf, "upp"),
    "stats.dirichlet": (lambda p: jsp.stats.dirichlet.logpdf(np.full(8, 0.125, np.float32), p[0]), "p"),
    "stats.multivariate_normal": (lambda x, s: jsp.stats.multivariate_normal.logpdf(x, jnp.zeros(8), s), "xs"),
    "stats.bernoulli": (lambda n, u: jsp.stats.bernoulli.logpmf(n % 2, u), "nu"),
    "stats.poisson": (lambda n, p: jsp.stats.poisson.logpmf(n, p), "np"),
    "stats.binom": (lambda n, u: jsp.stats.binom.logpmf(n, 8, u), "nu"),
    "stats.gaussian_kde": (lambda v, k: jsp.stats.gaussian_kde(v)(k), "vk"),
    "signal.convolve": (lambda v, k: jsp.signal.convolve(v, k, "same"), "vk"),
    "signal.convolve2d": (lambda x, w: jsp.signal.convolve2d(x, w[:3, :3], "same"), "xw"),
    "signal.detrend": (lambda x: jsp.signal.detrend(x, axis=1), "x"),
    "signal.fftconvolve": (lambda v, k: jsp.signal.fftconvolve(v, k), "vk"),
    "ndimage.map_coordinates": (lambda x, u: jsp.ndimage.map_coordinates(x, [u[0] * 3, u[1] * 7], 1), "xu"),
    "interpolate.grid": (
        lambda v, u: jsp.interpolate.RegularGridInterpolator((np.linspace(0.0, 1.0, 8),), v)(u[0][:, None]),
        "vu",
    ),
    "integrate.trapezoid": (lambda x: jsp.integrate.trapezoid(x, axis=1), "x"),
    "cluster.vq": (lambda x, w: jsp.cluster.vq.vq(x, w)[1], "xw"),
    "linalg.solve": (jsp.linalg.solve, "mw"),
    "linalg.cho_solve": (lambda s, w: jsp.linalg.cho_solve(jsp.linalg.cho_factor(s), w), "sw"),
    "linalg.lu_solve": (lambda m, w: jsp.linalg.lu_solve(jsp.linalg.lu_factor(m), w), "mw"),
    "linalg.solve_triangular": (lambda m, w: jsp.linalg.solve_triangular(m, w, lower=True), "mw"),
    "linalg.qr": (lambda m: jsp.linalg.qr(m)[1], "m"),
    "linalg.lu": (lambda m: jsp.linalg.lu(m)[2], "m"),
    "linalg.polar": (lambda m: jsp.linalg.polar(m)[0], "m"),
    "linalg.block_diag": (jsp.linalg.block_diag, "xx"),
    "linalg.expm_frechet": (lambda m, w: jsp.linalg.expm_frechet(m, w, compute_expm=False), "mw"),
    "jnp.linalg.matrix_power": (lambda m: jnp.linalg.matrix_power(m, 5), "m"),
    "jnp.linalg.multi_dot": (lambda a, b, c: jnp.linalg.multi_dot([a, b, c]), "www"),
    "jnp.linalg.solve": (jnp.linalg.solve, "mw"),
    "jnp.linalg.lstsq": (lambda m, w: jnp.linalg.lstsq(m, w)[0], "mw"),
    "jnp.linalg.eigh": (lambda s: jnp.linalg.eigh(s)[0], "s"),
    "jnp.linalg.svd": (lambda s: jnp.linalg.svd(s)[1], "s"),
    "jnp.linalg.qr": (lambda m: jnp.linalg.qr(m)[1], "m"),
    "jnp.linalg.tensorinv": (lambda m: jnp.linalg.tensorinv(m.reshape(2, 4, 8), 2), "m"),
    "jnp.linalg.tensorsolve": (lambda m, v: jnp.linalg.tensorsolve(m, v), "mv"),
    "jnp.linalg.cross": (lambda x, y: jnp.linalg.cross(x[:, :3], y[:, :3]), "xp"),
    "jax.checkpoint": (jax.checkpoint(lambda x, w: jnp.tanh(x @ w) @ w), "xw"),
    "jax.image.resize": (lambda x: jax.image.resize(x, (8, 8), "linear"), "x"),
    "jax.random.categorical": (lambda x: jax.random.categorical(jax.random.key(0), x), "x"),
    "jax.random.gamma": (lambda p: jax.random.gamma(jax.random.key(0), p), "p"),
    "jax.ops.segment_sum": (lambda x: jax.ops.segment_sum(x, _ROWS % 2, 2), "x"),
    "jax.ops.segment_max": (lambda x: jax.ops.segment_max(x, _ROWS % 2, 2), "x"),
    "jax.numpy.linalg.vecdot": (functools.partial(jnp.linalg.vecdot, axis=0), "xx"),
}
