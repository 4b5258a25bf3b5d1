"""Captures hold every tree bit for bit, are there as a whole or not at all, and do not fill a disk."""

import io
import json
import os
import subprocess
import sys
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx, struct
from flax.core import FrozenDict
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved, assert_same_program, compiled_quickly
from jaxmp._src.base.by_identity import ByIdentity
from jaxmp._src.replay import array_pickle, atomic_folders
from jaxmp.monitor import capture, load_capture


class Batch(NamedTuple):
    x: Any
    y: Any


@struct.dataclass
class Extra:
    mean: Any
    name: str = struct.field(pytree_node=False, default="")


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(2, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.tied = self.dense
        self.act = jax.nn.gelu

    def __call__(self, x):
        return self.act(self.drop(self.norm(self.tied(x))))


class Counter:
    """An object whose state is an array that is made when it is pickled, and gone after."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return Counter, (0,), jnp.full(3, self.value)

    def __setstate__(self, state):
        self.value = int(state[0])


def loss_fn(params, *args, **kwargs):
    return jnp.float32(0)


def test_arrays_that_live_only_while_they_are_written_keep_their_own_bytes():
    arrays, places = io.BytesIO(), ByIdentity()
    files = [io.BytesIO(), io.BytesIO()]
    for i, file in enumerate(files):
        array_pickle.Saver(file, arrays, places).dump([Counter(10 * i + k) for k in range(8)])
    for i, file in enumerate(files):
        found = array_pickle.Loader(io.BytesIO(file.getvalue()), arrays).load()
        assert [x.value for x in found] == [10 * i + k for k in range(8)]


def bits_of_all_kinds():
    """Every bit pattern of 8 and 16 bits, NaNs and subnormals included."""
    bytes_, shorts = np.arange(256, dtype=np.uint8), np.arange(65536, dtype=np.uint16)
    return {
        "bf16": jnp.asarray(shorts.view(jnp.bfloat16)),
        "f16": jnp.asarray(shorts.view(np.float16)),
        "e4m3": jnp.asarray(bytes_.view(jnp.float8_e4m3fn)),
        "e5m2": jnp.asarray(bytes_.view(jnp.float8_e5m2)),
        "f32": jnp.array([0.0, -0.0, 1e-45, np.inf, -np.inf, np.nan]),
        "i": jnp.arange(3),
        "b": jnp.array([True, False]),
        "empty": jnp.zeros((0, 3)),
        "c": jnp.array([1 + 2j]),
    }


TREES = {
    "dtypes": bits_of_all_kinds,
    "linen": lambda: nn.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))["params"],
    "FrozenDict": lambda: FrozenDict({"a": {"b": jnp.ones(2)}}),
    "NamedTuple": lambda: Batch(jnp.ones(2), [np.arange(3), (1, 2.5, True, None, "text")]),
    "dataclass": lambda: Extra(jnp.ones(2), "name"),
    "boxed": lambda: {"w": nn.Partitioned(jnp.ones(2), ("x",))},
    "optimizer": lambda: jaxmp.mixed_precision(optax.adamw(1e-3), "fp16").init({"w": jnp.ones(2)}),
    "nnx state": lambda: nnx.state(Net(nnx.Rngs(0))),
    "fp8 scales": lambda: {"fp8_lhs_e4m3_log2_scale": jnp.float32(-3.0)},
    "one twice": lambda: (lambda x: [x, x, {"again": x}])(jnp.ones(4)),
    "numpy": lambda: [np.float64(1e300), np.array(["a", "bc"]), np.int8(3), np.arange(6).reshape(2, 3).T],
}


@pytest.mark.thorough(2)
@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_bit_for_bit(tmp_path, name):
    tree = TREES[name]()
    path = capture(tmp_path, loss_fn, tree, extra=tree, loss_scale=2.0)
    for found in (load_capture(path), load_capture(tmp_path, like=(tree,))):
        for x in (found.args[0], found.kwargs["extra"]):
            assert jax.tree.structure(x) == jax.tree.structure(tree)
            assert list(map(type, jax.tree.leaves(x))) == list(map(type, jax.tree.leaves(tree)))
            for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(tree), strict=True):
                if not isinstance(b, jax.Array | np.ndarray | np.generic):
                    assert a == b
                    continue
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
                    a, b = jax.random.key_data(a), jax.random.key_data(b)
                assert np.asarray(a).tobytes() == np.asarray(b).tobytes()  # moved, and each NaN with its bits


@pytest.mark.thorough(1)
@pytest.mark.parametrize("implementation", ["threefry2x32", "rbg"])
def test_keys_come_back(tmp_path, implementation):
    keys = {"typed": jax.random.split(jax.random.key(3, impl=implementation), 2), "raw": jax.random.PRNGKey(1)}
    found = load_capture(capture(tmp_path, loss_fn, keys, loss_scale=1.0)).args[0]
    assert found["typed"].dtype == keys["typed"].dtype
    assert_moved(found, keys)
    assert_same_program(jax.random.normal(found["typed"][1]), jax.random.normal(keys["typed"][1]))


def test_a_scalar_that_gives_way_to_16_bits_still_does(tmp_path):
    found = load_capture(capture(tmp_path, loss_fn, [jnp.asarray(2.0), jnp.float32(2.0)], loss_scale=1.0)).args[0]
    assert [(x * jnp.float16(1)).dtype for x in found] == [jnp.float16, jnp.float32]


@pytest.mark.thorough(0)
def test_an_nnx_module_comes_back(tmp_path):
    model = Net(nnx.Rngs(0))
    model.dense.kernel[...] = jnp.arange(6.0).reshape(2, 3)
    found = load_capture(capture(tmp_path, loss_fn, model, {"teacher": model}, loss_scale=1.0))
    copy = found.args[0]
    assert type(copy) is Net and copy.tied is copy.dense and found.args[1]["teacher"] is copy
    assert_moved(nnx.to_pure_dict(nnx.state(copy)), nnx.to_pure_dict(nnx.state(model)))
    assert_same_program(copy(jnp.ones((4, 2))), model(jnp.ones((4, 2))))  # its dropout, too


def test_sharded_arrays_are_gathered_and_put_back(tmp_path):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, P("b", "a"))
    x = jax.device_put(np.arange(32, dtype=np.float16).reshape(4, 8), sharding)
    stacked = jax.pmap(lambda x: x)(jnp.arange(8.0))
    path = capture(tmp_path, loss_fn, {"w": x}, stacked, loss_scale=1.0)
    found = load_capture(path)
    assert_moved(found.args, ({"w": jnp.asarray(np.asarray(x))}, jnp.arange(8.0)))
    assert len(found.args[0]["w"].devices()) == 1
    again = load_capture(path, like=({"w": x}, stacked)).args
    assert again[0]["w"].sharding == sharding
    assert_moved(again, ({"w": x}, stacked))


def test_what_a_step_was_is_readable(tmp_path):
    observed = {"loss": jnp.float32(2.5), "skipped": jnp.array(True), "step": 7, "grad_norm": float("nan")}
    path = capture(tmp_path, loss_fn, 1.0, loss_scale=jnp.float32(2.0**15), accumulate=4, observed=observed)
    meta = json.loads((path / "capture.json").read_text())
    assert (meta["loss_scale"], meta["function"]) == (32768.0, "test_captures:loss_fn")
    assert (meta["observed"]["loss"], meta["observed"]["skipped"], meta["observed"]["step"]) == (2.5, 1.0, 7.0)
    assert meta["about"]["jax"] == jax.__version__ and "XLA_FLAGS" in meta["about"]
    found = load_capture(path)
    assert (found.loss_scale, found.options["accumulate"], found.options["wrt"]) == (32768.0, 4, nnx.Param)


def test_the_last_of_a_directory_is_loaded_and_no_more_than_keep_are_written(tmp_path):
    for i in range(3):
        assert capture(tmp_path, loss_fn, i, loss_scale=1.0).name == f"00000{i}"
    assert load_capture(tmp_path).args == (2,)
    with pytest.warns(UserWarning, match="holds keep=3 captures, so this step is not captured. Move them away"):
        assert capture(tmp_path, loss_fn, 3, loss_scale=1.0) is None
    assert capture(tmp_path, loss_fn, 3, loss_scale=1.0, keep=4).name == "000003"
    assert sorted(os.listdir(tmp_path)) == [f"00000{i}" for i in range(4)]


def test_processes_of_one_job_count_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    names = []
    for process in (0, 1, 1):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        names.append(capture(tmp_path, loss_fn, process, loss_scale=1.0, keep=2).name)
    assert names == ["000000-process0", "000000-process1", "000001-process1"]


def test_two_jobs_in_one_directory_do_not_meet(tmp_path, monkeypatch):
    """The other job takes the name between the look and the rename."""
    real = atomic_folders.folders_in
    capture(tmp_path, loss_fn, "other", loss_scale=1.0)
    blind = iter([True, True])
    monkeypatch.setattr(atomic_folders, "folders_in", lambda *args: [] if next(blind, False) else real(*args))
    assert capture(tmp_path, loss_fn, "mine", loss_scale=1.0).name == "000001"
    assert [load_capture(tmp_path / name).args for name in ("000000", "000001")] == [("other",), ("mine",)]


# Writes that fail


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError], ids=lambda e: e.__name__)
def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch, error):
    def fail(*args):
        raise error("no space left")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(error):
        capture(tmp_path, loss_fn, jnp.ones(3), loss_scale=1.0)
    assert os.listdir(tmp_path) == []


KILLED = """
import os, sys
import jax.numpy as jnp
from jaxmp.monitor import capture
os.fsync = lambda f: os._exit(9)
capture(sys.argv[1], print, jnp.ones(3), loss_scale=1.0)
"""


@pytest.mark.thorough(0)
def test_a_job_that_is_killed_leaves_no_half_capture(tmp_path):
    run = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], env=compiled_quickly(os.environ), check=False)
    assert run.returncode == 9
    assert len(os.listdir(tmp_path)) == 1  # hidden, and no capture
    with pytest.raises(FileNotFoundError, match="must be a capture, or a directory of captures; there is none"):
        load_capture(tmp_path)
    capture(tmp_path, loss_fn, 1, loss_scale=1.0)
    assert os.listdir(tmp_path) == ["000000"]  # the half is gone


# What cannot be stored


def test_a_donated_argument_is_named(tmp_path):
    params = {"w": jnp.ones(3)}
    jax.jit(lambda p: p, donate_argnums=0)(params)
    with pytest.raises(ValueError, match="0/w that was donated .* after a skipped step the params are"):
        capture(tmp_path, loss_fn, params, loss_scale=1.0)
    scale = jnp.float32(2)
    scale.delete()
    with pytest.raises(ValueError, match="got one at loss_scale that was donated"):
        capture(tmp_path, loss_fn, 1, loss_scale=scale)


def test_a_traced_argument_is_named(tmp_path):
    with pytest.raises(TypeError, match=r"got float32\[2\] at argument x. Call jaxmp.monitor.capture outside jit"):
        jax.jit(lambda x: capture(tmp_path, loss_fn, 1, x=x, loss_scale=1.0))(jnp.ones(2))


def test_an_array_of_other_processes_is_named(tmp_path, monkeypatch):
    x = jnp.ones(2)
    monkeypatch.setattr(type(x), "is_fully_addressable", False)
    monkeypatch.setattr(type(x), "is_fully_replicated", False)
    with pytest.raises(ValueError, match="got one at argument 0/w, and other processes hold parts of it. Gather"):
        capture(tmp_path, loss_fn, {"w": x}, loss_scale=1.0)


def test_what_is_observed_are_scalars(tmp_path):
    with pytest.raises(ValueError, match=r"must be scalars; got shape \(2,\) at norms"):
        capture(tmp_path, loss_fn, 1, loss_scale=1.0, observed={"norms": jnp.ones(2)})


def test_an_argument_has_one_owner(tmp_path):
    def with_keep(params, x, *, keep=0.9):
        return x

    with pytest.raises(ValueError, match="got keep=, which both have. Pass it by position"):
        capture(tmp_path, with_keep, 1, 2, loss_scale=1.0)
    with pytest.raises(TypeError, match="loss_scale"):
        capture(tmp_path, loss_fn, 1)  # pyright: ignore[reportCallIssue]


def test_functions_without_a_name_say_so_when_they_are_called(tmp_path):
    model = Net(nnx.Rngs(0))
    model.act = lambda x: x
    path = capture(tmp_path, lambda model: 0.0, model, loss_scale=1.0)
    found = load_capture(path)
    assert found.function == ""
    with pytest.raises(ValueError, match="<lambda> was not stored with the capture, .* Pass like=, arguments that"):
        found.args[0](jnp.ones((1, 2)))
    found.args[0].dense(jnp.ones((1, 2)))  # of most modules nothing is called by such a name
    like = Net(nnx.Rngs(1))
    like.act = lambda x: -x
    (copy,) = load_capture(path, like=(like,)).args
    assert_moved(copy.dense.kernel[...], model.dense.kernel[...])
    assert_exact(copy.act(jnp.ones(2)), -jnp.ones(2))


def test_a_class_without_a_name_needs_like(tmp_path):
    class Local(Net):
        pass

    model = Local(nnx.Rngs(0))
    path = capture(tmp_path, loss_fn, model, loss_scale=1.0)
    with pytest.raises(ValueError, match="hold an object that cannot be stored: .*Local.* Pass like="):
        load_capture(path)
    (copy,) = load_capture(path, like=(Local(nnx.Rngs(1)),)).args
    assert_moved(copy.dense.kernel[...], model.dense.kernel[...])


@pytest.mark.parametrize(
    ("like", "message"),
    [
        ({"w": jnp.ones(2), "v": 1}, "like must have the leaves that were captured; only one of the two has 0/v"),
        ({"w": jnp.ones(3)}, r"got float32\[3\] at 0/w, where float32\[2\] was captured"),
        ({"w": jnp.ones(2, jnp.bfloat16)}, r"got bfloat16\[2\] at 0/w, where float32\[2\] was captured"),
    ],
    ids=["leaves", "shape", "dtype"],
)
def test_like_is_of_the_same_model(tmp_path, like, message):
    path = capture(tmp_path, loss_fn, {"w": jnp.ones(2)}, loss_scale=1.0)
    with pytest.raises(ValueError, match=message):
        load_capture(path, like=(like,))


def test_64_bits_are_not_cut_in_silence(tmp_path):
    with jax.enable_x64(True):
        path = capture(tmp_path, loss_fn, jnp.arange(3.0, dtype=jnp.float64), loss_scale=1.0)
        assert load_capture(path).args[0].dtype == jnp.float64
    with pytest.raises(ValueError, match="got float64 arrays, and jax_enable_x64 is off here"):
        load_capture(path)


def test_what_was_in_main_is_looked_up_where_it_is_told(tmp_path, monkeypatch):
    batch = Batch(1, 2)
    monkeypatch.setattr(Batch, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "Batch", Batch, raising=False)
    path = capture(tmp_path, loss_fn, batch, loss_scale=1.0)
    monkeypatch.undo()
    assert load_capture(path, functions_of=sys.modules[__name__]).args == (batch,)


def test_an_array_that_occurs_often_is_stored_once(tmp_path):
    x = jnp.ones(1000)
    path = capture(tmp_path, loss_fn, [x] * 10, x=x, loss_scale=1.0)
    assert (path / "arrays.bin").stat().st_size == 4000
    (found,) = load_capture(path).args
    assert all(x is found[0] for x in found)
