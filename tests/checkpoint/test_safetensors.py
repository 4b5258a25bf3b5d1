"""Weights in safetensors files: read back by the library itself, by names and layouts of other systems."""

import functools
import json
import pathlib
import shutil
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors
import safetensors.numpy
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import assert_exact, assert_moved
from jaxmp.checkpoint import load_safetensors, save_safetensors

RNG = np.random.default_rng(0)
PARAMS = {
    "embed": {"embedding": jnp.asarray(RNG.normal(size=(6, 4)), jnp.float32)},
    "mlp": {"kernel": jnp.asarray(RNG.normal(size=(4, 8)), jnp.float32), "bias": jnp.arange(8.0)},
    "conv": {"kernel": jnp.asarray(RNG.normal(size=(3, 3, 4, 8)), jnp.float32)},
    "norm": {"scale": jnp.full(4, 1.001)},
}
POLICY = jaxmp.get_policy("bf16", keep_fp32=("norm/*",))
save_in_shards = functools.partial(save_safetensors, dtype=jnp.float32, max_shard_size=200)


def header(path):
    """{name: (dtype as it is written, shape)}, by the library's own reader."""
    with safetensors.safe_open(path, framework="np") as file:
        return {k: (file.get_slice(k).get_dtype(), tuple(file.get_slice(k).get_shape())) for k in file.keys()}


KINDS = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}


def read(path):
    """The tensors of a file by name: a header in JSON behind its length, then the bytes."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    entries = {k: x for k, x in json.loads(data[8:begin]).items() if k != "__metadata__"}
    parts = {k: data[begin + x["data_offsets"][0] : begin + x["data_offsets"][1]] for k, x in entries.items()}
    return {k: np.frombuffer(parts[k], KINDS[x["dtype"]]).reshape(x["shape"]) for k, x in entries.items()}


def test_masters_are_written_and_not_what_they_are_rounded_to(tmp_path):
    tx = jaxmp.mixed_precision(optax.sgd(0.1), POLICY)
    params, opt_state = POLICY.cast_to_param(PARAMS), jax.jit(tx.init)(PARAMS)
    save_safetensors(tmp_path / "w", jaxmp.get_master_params(opt_state, params), dtype=jnp.float32)
    assert_moved(load_safetensors(tmp_path / "w", PARAMS), PARAMS)
    save_safetensors(tmp_path / "rounded", params, dtype=jnp.float32)
    rounded = load_safetensors(tmp_path / "rounded", PARAMS)["mlp"]["kernel"]
    assert_exact(rounded, params["mlp"]["kernel"].astype("float32"))
    assert header(tmp_path / "w") == {
        "conv.kernel": ("F32", (3, 3, 4, 8)), "embed.embedding": ("F32", (6, 4)), "mlp.bias": ("F32", (8,)),
        "mlp.kernel": ("F32", (4, 8)), "norm.scale": ("F32", (4,)),
    }  # fmt: skip


@pytest.mark.parametrize(("dtype", "code", "layout"), [("float16", "F16", "torch"), ("bfloat16", "BF16", "flax")])
def test_sixteen_bits_are_each_rounded_once(dtype, code, layout, tmp_path):
    big = PARAMS | {"mlp": PARAMS["mlp"] | {"bias": jnp.full(8, 1e6)}}
    save_safetensors(tmp_path / "w", big, dtype=dtype, layout=layout)
    assert {x[0] for x in header(tmp_path / "w").values()} == {code}
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, dtype), big)
    expected = jax.tree.map(lambda x: jaxmp.casting.saturating_cast(x, dtype), big)
    assert_exact(load_safetensors(tmp_path / "w", like, layout=layout), expected)


def test_torch_has_its_names_and_its_layout(tmp_path):
    save_safetensors(tmp_path / "w", PARAMS, dtype=jnp.float32, layout="torch", rename=lambda name: f"model.{name}")
    tensors = read(tmp_path / "w")
    assert_moved(tensors["model.mlp.weight"], np.asarray(PARAMS["mlp"]["kernel"]).T)
    assert_moved(tensors["model.conv.weight"], np.asarray(PARAMS["conv"]["kernel"]).transpose(3, 2, 0, 1))
    assert_moved(tensors["model.embed.weight"], PARAMS["embed"]["embedding"])
    assert sorted(tensors) == [
        f"model.{n}" for n in ("conv.weight", "embed.weight", "mlp.bias", "mlp.weight", "norm.weight")
    ]
    with safetensors.safe_open(tmp_path / "w", framework="np") as file:
        assert file.metadata() == {"format": "pt"}  # without it transformers refuses the file
    with pytest.raises(ValueError, match=r"kernel of 3 axes; got one at heads/kernel. Reshape it"):
        save_safetensors(tmp_path / "w", {"heads": {"kernel": jnp.ones((2, 2, 2))}}, layout="torch")


@pytest.mark.parametrize("layout", ["flax", "torch"])
def test_fp8_kernels_stand_beside_their_scale(layout, tmp_path):
    save_safetensors(tmp_path / "w", PARAMS, dtype=jnp.float8_e4m3fn, layout=layout, keep=("conv/*",))
    name = {"flax": "kernel", "torch": "weight"}[layout]
    tensors = read(tmp_path / "w")
    assert tensors[f"conv.{name}"].dtype == ml_dtypes.bfloat16
    kernel = np.asarray(PARAMS["mlp"]["kernel"] if layout == "flax" else PARAMS["mlp"]["kernel"].T, np.float64)
    scale = tensors[f"mlp.{name}_scale"]
    assert header(tmp_path / "w")[f"mlp.{name}"][0] == "F8_E4M3" and scale.dtype == np.float32 and scale.shape == ()
    assert float(scale) == pytest.approx(np.abs(kernel).max() / 448, rel=1e-6)
    expected = (kernel / np.float64(scale)).clip(-448, 448).astype(ml_dtypes.float8_e4m3fn)
    assert np.mean(expected != tensors[f"mlp.{name}"]) < 0.05  # the quotient is rounded in float32
    np.testing.assert_allclose(tensors[f"mlp.{name}"].astype(np.float64) * scale, kernel, rtol=2.0**-4, atol=1e-4)
    loaded = load_safetensors(tmp_path / "w", PARAMS, layout=layout)
    np.testing.assert_allclose(loaded["mlp"]["kernel"], PARAMS["mlp"]["kernel"], rtol=2.0**-4, atol=1e-4)


def fp8_layer(kernel):
    names = {"fp8_lhs_e4m3_log2_scale": 3.0, "fp8_rhs_e4m3_log2_scale": 0.0, "fp8_grad_e5m2_log2_scale": 5.0}
    return {"dense": {"kernel": kernel, "op": jax.tree.map(jnp.float32, names)}}


def test_scales_of_training_stay_out_and_are_kept(tmp_path):
    params = fp8_layer(PARAMS["mlp"]["kernel"])
    save_safetensors(tmp_path / "w", params, dtype=jnp.float8_e4m3fn)
    assert sorted(read(tmp_path / "w")) == ["dense.kernel", "dense.kernel_scale"]
    loaded = load_safetensors(tmp_path / "w", fp8_layer(jax.ShapeDtypeStruct((4, 8), jnp.float32)))
    assert float(loaded["dense"]["op"]["fp8_lhs_e4m3_log2_scale"]) == 3.0
    described = jax.eval_shape(lambda: fp8_layer(jnp.ones((4, 8))))
    assert float(load_safetensors(tmp_path / "w", described)["dense"]["op"]["fp8_lhs_e4m3_log2_scale"]) == 0.0


def test_files_of_engines_with_a_scale_for_each_row(tmp_path):
    weight = np.ones((8, 4), ml_dtypes.float8_e4m3fn)
    scale = np.arange(8, dtype=np.float32)
    safetensors.numpy.save_file({"mlp.weight": weight, "mlp.weight_scale": scale.reshape(8, 1)}, tmp_path / "w")
    loaded = load_safetensors(tmp_path / "w", {"mlp": {"kernel": PARAMS["mlp"]["kernel"]}}, layout="torch")
    assert_exact(loaded["mlp"]["kernel"], jnp.asarray(np.tile(scale, (4, 1))))


def test_shards_and_shardings(tmp_path):
    whole = {k: PARAMS[k] for k in ("mlp", "norm")}
    save_safetensors(tmp_path / "1", whole, dtype=jnp.float32)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    split = NamedSharding(mesh, P("x"))
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=split), whole)
    loaded = load_safetensors(tmp_path / "1", like)
    assert all(x.sharding == split for x in jax.tree.leaves(loaded))
    assert not any(x.committed for x in jax.tree.leaves(load_safetensors(tmp_path / "1", whole)))
    save_safetensors(tmp_path / "3", loaded, dtype=jnp.float32)  # gathered
    assert_moved(load_safetensors(tmp_path / "3", whole), whole)


def test_what_does_not_fit(tmp_path):
    path = tmp_path / "w"
    save_safetensors(path, {"mlp": PARAMS["mlp"]}, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"norm.scale \(norm/scale\) is not among mlp.bias, mlp.kernel"):
        load_safetensors(path, {"norm": PARAMS["norm"], "mlp": PARAMS["mlp"]})
    with pytest.raises(ValueError, match="mlp.bias is not in it. Pass strict=False"):
        load_safetensors(path, {"mlp": {"kernel": PARAMS["mlp"]["kernel"]}})
    assert_moved(
        load_safetensors(path, {"mlp": {"bias": jnp.ones(8)}}, strict=False), {"mlp": {"bias": jnp.arange(8.0)}}
    )
    with pytest.raises(ValueError, match=r"mlp.bias has shape \(8,\), expected \(7,\) at mlp/bias"):
        load_safetensors(path, {"mlp": {"bias": jnp.ones(7)}}, strict=False)
    with pytest.raises(ValueError, match="layout must be"):
        load_safetensors(path, PARAMS, layout="tf")  # pyright: ignore
    with pytest.raises(ValueError, match="dtype must be one of float32, .*; got int8"):
        save_safetensors(path, {}, dtype=jnp.int8)
    tx, params = jaxmp.mixed_precision(optax.sgd(0.1), "bf16"), {"w": jnp.ones(1)}
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=params, tx=tx, policy="bf16")
    with pytest.raises(TypeError, match="got a TrainState .* as params. Its parts are state.params and state.opt_st"):
        save_safetensors(path, state)
    with pytest.raises(ValueError, match="needs its own name; got 'x' for mlp/"):
        save_safetensors(path, {"mlp": PARAMS["mlp"]}, rename=lambda name: "x")
    safetensors.numpy.save_file({"k": np.ones((2, 2), ml_dtypes.float8_e4m3fn)}, tmp_path / "bare")
    with pytest.raises(ValueError, match="k is in fp8, so k_scale must be one float, or one for each row"):
        load_safetensors(tmp_path / "bare", {"k": jnp.ones((2, 2))})


def test_a_damaged_file_is_an_error_and_a_failed_save_leaves_the_old_one(tmp_path):
    path = tmp_path / "w"
    save_safetensors(path, PARAMS)
    whole = path.read_bytes()
    for damaged in (whole[: len(whole) // 2], whole[:4], b"PK" + whole, b""):
        (tmp_path / "bad").write_bytes(damaged)
        with pytest.raises(ValueError, match="must be a whole safetensors file, .*; got .*bad"):
            load_safetensors(tmp_path / "bad", PARAMS)
    with pytest.raises(ValueError, match="must be a whole safetensors file, .*; got .*nowhere"):
        load_safetensors(tmp_path / "nowhere", PARAMS)
    with pytest.raises(ValueError):
        save_safetensors(path, PARAMS, rename=lambda name: "x")
    assert path.read_bytes() == whole and sorted(x.name for x in tmp_path.iterdir()) == ["bad", "w"]


def test_one_file_at_a_time_beside_the_arrays(tmp_path):
    """The host's memory: that of some leaves of a model of 64. jax's CPU client runs at most 32 programs behind the
    host, and each holds its argument until it ran: on a loaded machine these copies count, too."""
    leaf = 2**19
    model = {f"w{i:02}": jnp.full((leaf // 4,), float(i)) for i in range(64)}
    save = functools.partial(save_in_shards, tmp_path, model, max_shard_size=4 * leaf)
    for call in (save, functools.partial(load_safetensors, tmp_path, model)):
        call()  # what is imported and compiled once
        tracemalloc.start()
        result = call()
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak <= 44 * leaf, call
    assert_moved(result, model)


def test_dtypes_that_nobody_can_guess_are_named(tmp_path):
    for code, nbytes in (("F8_E8M0", 4), ("F4", 2), ("C64", 32), ("F8_E4M3FNUZ", 4)):
        header = json.dumps({"w": {"dtype": code, "shape": [4], "data_offsets": [0, nbytes]}}).encode()
        (tmp_path / code).write_bytes(len(header).to_bytes(8, "little") + header + bytes(nbytes))
        with pytest.raises(ValueError, match=code):  # as one that is not read, or as one that is no format at all
            load_safetensors(tmp_path / code, {"w": jnp.ones(4)})


def test_what_is_not_finite_stays_so_and_what_is_too_large_becomes_the_largest(tmp_path):
    x = np.array([np.inf, -np.inf, np.nan, 1e6, -1e6, 65504.0], np.float32)
    save_safetensors(tmp_path / "w", {"b": x}, dtype=jnp.float16)
    expected = np.array([np.inf, -np.inf, np.nan, 65504, -65504, 65504], np.float16)
    np.testing.assert_array_equal(load_safetensors(tmp_path / "w", {"b": expected})["b"], expected)
    save_safetensors(tmp_path / "w", {"b": x}, dtype=jnp.float32)
    np.testing.assert_array_equal(load_safetensors(tmp_path / "w", {"b": jnp.asarray(expected)})["b"], expected)
    safetensors.numpy.save_file({"b": np.array([1e300, 0.1])}, tmp_path / "w")
    largest = np.array([np.finfo(np.float32).max, 0.1], np.float32)
    assert_moved(load_safetensors(tmp_path / "w", {"b": jnp.zeros(2)})["b"], largest)
    assert_moved(load_safetensors(tmp_path / "w", {"b": np.zeros(2)})["b"], np.array([1e300, 0.1]))


def test_integers_go_out_as_they_are_and_must_fit(tmp_path):
    """jnp.asarray(2**40) is 0 in int32."""
    save_safetensors(tmp_path / "w", {"n": np.array([3, 2**40]), "one": 5})
    loaded = load_safetensors(tmp_path / "w", {"n": np.zeros(2, np.int64), "one": np.int64(0)})
    assert loaded["n"].tolist() == [3, 2**40] and loaded["n"].dtype == np.int64 and int(loaded["one"]) == 5
    like = {"n": jnp.zeros(2, jnp.int32), "one": jnp.int32(0)}
    with pytest.raises(ValueError, match="n is int64, expected int32 at n"):
        load_safetensors(tmp_path / "w", like)
    assert int(load_safetensors(tmp_path / "w", {"one": like["one"]}, strict=False)["one"]) == 5
    with pytest.raises(ValueError, match="safetensors holds tensors of .*; got complex64 at c"):
        save_safetensors(tmp_path / "w", {"c": jnp.ones(2, jnp.complex64)})


def test_a_scale_of_a_kernel_has_a_name_of_its_own(tmp_path):
    params = {"d": {"kernel": jnp.full((2, 2), 3.0), "kernel_scale": jnp.float32(5)}}
    with pytest.raises(ValueError, match="needs its own name; got 'd.kernel_scale'"):
        save_safetensors(tmp_path / "w", params, dtype=jnp.float8_e4m3fn)
    safetensors.numpy.save_file({"d.kernel": np.ones((2, 2)), "d.kernel_scale": np.ones(2)}, tmp_path / "w")
    with pytest.raises(ValueError, match="d.kernel_scale is not in it"):  # nothing was multiplied by it
        load_safetensors(tmp_path / "w", {"d": {"kernel": jnp.ones((2, 2))}})


def test_a_kernel_that_is_not_finite_has_no_scale(tmp_path):
    for bad in (np.inf, np.nan):
        params = {"dense": {"kernel": np.full((4, 4), bad, np.float32)}}
        with pytest.raises(ValueError, match="which an inf or a NaN takes from all; got one at dense/kernel"):
            save_safetensors(tmp_path / "w", params, dtype=jnp.float8_e4m3fn)
    assert list(tmp_path.iterdir()) == []
    save_safetensors(tmp_path / "w", params, dtype=jnp.float8_e4m3fn, keep="kernel")


def test_shards_with_the_index_of_hugging_face(tmp_path):
    folder = tmp_path / "model"
    save_in_shards(folder, PARAMS)
    files = sorted(x.name for x in folder.iterdir())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert files == [*names, "model.safetensors.index.json"]
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    sizes = {}
    for name in names:
        with safetensors.safe_open(folder / name, framework="np") as file:
            assert file.metadata() == {"format": "flax"}
            assert sorted(file.keys()) == sorted(k for k, at in index["weight_map"].items() if at == name)
            sizes[name] = sum(file.get_tensor(k).nbytes for k in file.keys())
    assert len(index["weight_map"]) == 5 and all(n <= 200 or len(header(folder / x)) == 1 for x, n in sizes.items())
    assert_moved(load_safetensors(folder, PARAMS), PARAMS)


def test_a_folder_holds_the_last_model_only(tmp_path):
    save_in_shards(tmp_path / "m", PARAMS)
    (tmp_path / "m/config.json").write_text("{}")
    other = jax.tree.map(lambda x: x + 1, PARAMS)
    save_in_shards(tmp_path / "m", other, max_shard_size=900)
    assert_moved(load_safetensors(tmp_path / "m", PARAMS), other)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 2 and (tmp_path / "m/config.json").exists()
    save_in_shards(tmp_path / "m", PARAMS, max_shard_size=10**9)
    assert sorted(x.name for x in (tmp_path / "m").iterdir()) == ["config.json", "model.safetensors"]
    assert_moved(load_safetensors(tmp_path / "m", PARAMS), PARAMS)


def test_a_save_that_stops_between_its_files_leaves_no_mix_of_two_models(tmp_path, monkeypatch):
    save_in_shards(tmp_path / "m", PARAMS)
    replace, names = pathlib.Path.replace, []

    def stops(self, target):
        names.append(target.name)
        if len(names) == 2:
            raise OSError("no space left on device")
        return replace(self, target)

    monkeypatch.setattr(pathlib.Path, "replace", stops)
    with pytest.raises(OSError, match="no space left"):
        save_in_shards(tmp_path / "m", jax.tree.map(lambda x: x + 1, PARAMS))
    with pytest.raises(ValueError, match="a folder must hold one model"):
        load_safetensors(tmp_path / "m", PARAMS)


def test_shards_and_their_index_must_belong_together(tmp_path):
    save_in_shards(tmp_path, PARAMS)
    index, first = tmp_path / "model.safetensors.index.json", tmp_path / "model-00001-of-00003.safetensors"
    whole, text = first.read_bytes(), index.read_text()
    first.unlink()
    with pytest.raises(ValueError, match="all files that it lists must be whole; .*model-00001-of-00003"):
        load_safetensors(tmp_path, PARAMS)
    first.write_bytes(whole)
    weight_map = json.loads(text)["weight_map"]
    for name, changed in (
        ("new", weight_map | {"new": first.name}),
        ("mlp.bias", {name: file for name, file in weight_map.items() if name != "mlp.bias"}),
        ("mlp.bias", weight_map | {"mlp.bias": weight_map["norm.scale"]}),
    ):
        index.write_text(json.dumps({"weight_map": changed}))
        with pytest.raises(ValueError, match=f"its files differ in {name}"):
            load_safetensors(tmp_path, PARAMS)
    for bad in ("", "[]", '{"weight_map": 3}', "{}"):
        index.write_text(bad)
        with pytest.raises(ValueError, match="an index .* must be whole"):
            load_safetensors(tmp_path, PARAMS)
    index.write_text(text)
    shutil.copy(first, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="a folder must hold one model"):
        load_safetensors(tmp_path, PARAMS)
    (tmp_path / "model.safetensors").unlink()
    shutil.copy(first, tmp_path / "model-00002-of-00003.safetensors")  # a tensor in two files
    with pytest.raises(ValueError, match="its files differ in"):
        load_safetensors(tmp_path, PARAMS)


def test_a_folder_without_a_model_or_with_two(tmp_path):
    with pytest.raises(ValueError, match="a folder must hold one model"):
        load_safetensors(tmp_path, PARAMS)
    for name in ("a", "b"):
        save_safetensors(tmp_path / f"{name}.safetensors", PARAMS, dtype=jnp.float32)
    with pytest.raises(ValueError, match="a folder must hold one model"):
        load_safetensors(tmp_path, PARAMS)
    (tmp_path / "b.safetensors").unlink()
    assert_moved(load_safetensors(tmp_path, PARAMS), PARAMS)
    with pytest.raises(OSError):
        save_safetensors(tmp_path / "a.safetensors", PARAMS, max_shard_size=100)
    with pytest.raises(ValueError, match="max_shard_size= is a number of bytes; got '5GB'"):
        save_safetensors(tmp_path / "m", PARAMS, max_shard_size="5GB")


@pytest.mark.parametrize(
    ("dtype", "layout"), [(jnp.bfloat16, "flax"), (jnp.float8_e4m3fn, "flax"), (jnp.float8_e4m3fn, "torch")]
)
def test_frozen_kernels(tmp_path, dtype, layout):
    """Their values come back bit for bit, as frozen kernels or as arrays; in fp8 with a scale for each row."""
    weights = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    params = {"a": {"kernel": weights, "bias": weights[0].astype(jnp.bfloat16)}, "b": {"kernel": 100 * weights}}
    frozen = jaxmp.fp8.freeze(params)
    save_safetensors(tmp_path / "w", frozen, layout=layout, dtype=dtype)
    for like in (frozen, params, jax.eval_shape(jaxmp.fp8.freeze, params)):
        loaded = load_safetensors(tmp_path / "w", like, layout=layout)
        for name in params:
            assert_exact(jnp.asarray(loaded[name]["kernel"]), jnp.asarray(frozen[name]["kernel"]))
