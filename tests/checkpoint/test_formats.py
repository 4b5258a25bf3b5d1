"""Checkpoints that older versions wrote are restored, bit for bit; those of newer ones are refused."""

import json
import pathlib
import sys
import zipfile
from importlib import metadata

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmp
from helpers import assert_moved
from jaxmp import checkpoint
from jaxmp._src.checkpoint import orbax

sys.path.insert(0, str(pathlib.Path(__file__).parent / "kept"))
import jobs

KEPT = pathlib.Path(jobs.__file__).parent
FORMATS = ["before_formats", "format_1"]


def unpacked(form, name, tmp_path):
    """(folder of a kept checkpoint, the digests of what it holds)."""
    with zipfile.ZipFile(KEPT / form / f"{name}.zip") as archive:
        archive.extractall(tmp_path / name)
    return tmp_path / name, (tmp_path / name / "bits").read_text()


@pytest.mark.thorough(2)
@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["plain", "fp8"])
def test_a_kept_checkpoint_comes_back_bit_for_bit(form, name, tmp_path):
    folder, bits = unpacked(form, name, tmp_path)
    tx, policy, params = getattr(jobs, name)()
    extra = {"position": 0, "mean": jax.ShapeDtypeStruct((3,), "float32"), "key": jax.random.key(0)}
    found = checkpoint.restore(folder, tx, params=policy.cast_to_param(params), extra=extra)
    assert found.step == 2 and jobs.bits((found.params, found.opt_state)) == bits
    assert jax.tree.structure(found.opt_state) == jax.tree.structure(tx.init(params))
    assert all(getattr(found.opt_state, count) == -1 for count in jobs.LATER)  # they start as in a new run
    assert found.extra["position"] == 7 and found.extra["mean"].tolist() == [0.0, 1.0, 2.0]
    assert (jax.random.key_data(found.extra["key"]) == jax.random.key_data(jax.random.key(3))).all()


@pytest.mark.parametrize("form", FORMATS)
def test_kept_modules_come_back_bit_for_bit(form, tmp_path):
    folder, bits = unpacked(form, "nnx", tmp_path)
    job = jobs.modules()
    assert jobs.bits(jobs.values_of_modules(job)) != bits
    found = checkpoint.restore_job(folder, job, extra={"position": 0})
    assert found.step == 2 and found.extra == {"position": 7}
    assert jobs.bits(jobs.values_of_modules(job)) == bits


@pytest.mark.thorough(2)
@pytest.mark.parametrize("word", ["master_params", "amax_states", "guarded", "optimizer_state", "mu", "scaling"])
def test_a_record_without_a_format_is_read_by_names(word, tmp_path):
    """What an older jaxmp saved of a layer that is called as a field, and could not restore."""
    tx, policy = jaxmp.mixed_precision(optax.adam(1e-2), "bf16"), jaxmp.get_policy("bf16")
    params = policy.cast_to_param({word: {"w": jnp.ones(3)}, "z": jnp.zeros(2)})
    state = jax.tree.map(lambda x: x + 3 if x.ndim else x, tx.init(params))
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=params, opt_state=state)
    file = tmp_path / "0" / "jaxmp" / "metadata"
    about = json.loads(file.read_text())
    older = {name: x for name, x in about.items() if name not in ("format", "leaves", "names_are_escaped")}
    del older["record_checksum"]
    file.write_text(json.dumps(orbax.write_record(older)))
    found = checkpoint.restore(tmp_path, tx, params=params)
    assert_moved((found.params, found.opt_state), (params, state))
    assert "format" not in checkpoint.read_metadata(tmp_path)


def test_the_record_has_a_format_and_the_version_and_a_newer_one_is_refused(tmp_path):
    params = {"w": jnp.ones(2)}
    with checkpoint.manager(tmp_path) as steps:
        checkpoint.save(steps, 0, params=params, opt_state=())
    about = checkpoint.read_metadata(tmp_path)
    assert about["format"] == 1 and about["versions"]["jaxmp"] == metadata.version("jaxmp")
    file = tmp_path / "0" / "jaxmp" / "metadata"
    newer = json.loads(file.read_text()) | {"format": 7, "versions": {"jaxmp": "9.8"}}
    del newer["record_checksum"]
    file.write_text(json.dumps(orbax.write_record(newer)))
    here = about["versions"]["jaxmp"]
    told = f"a format that this jaxmp reads, up to 1; it is of format 7, written by jaxmp 9.8, and this is jaxmp {here}"
    with pytest.raises(ValueError, match=told):
        checkpoint.restore(tmp_path, None, params=params)
    assert checkpoint.read_metadata(tmp_path)["format"] == 7
