"""A URL is handed on to Orbax, or is an error of `manager`; it never becomes a folder below the working directory."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest

from helpers import ROOT, assert_moved, compiled_quickly
from jaxmp import checkpoint
from jaxmp._src.checkpoint import places

PARAMS = {"w": jnp.arange(3.0)}


@pytest.mark.parametrize("url", ["s3://bucket/run", "memory://run", "az://box/run", "https://host/run", "S3://b"])
def test_a_scheme_that_orbax_does_not_reach_is_an_error_that_names_it(url, tmp_path, monkeypatch):
    """Steps were saved below the working directory, in ./s3:/bucket/run."""
    monkeypatch.chdir(tmp_path)
    told = rf"got '{url}', whose scheme {url.partition(':')[0].lower()}:// it does not reach. Mount the storage"
    for call in (checkpoint.manager, lambda url: checkpoint.restore(url, None, params=PARAMS)):
        with pytest.raises(ValueError, match=told):
            call(url)
    with pytest.raises(ValueError, match="a URL must be passed as text: pathlib.Path takes one of its slashes away"):
        checkpoint.manager(pathlib.Path(url))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(
    any(map(importlib.util.find_spec, ("gcsfs", "tensorflow"))), reason="needs an environment that lacks them"
)
def test_storage_that_cannot_be_reached_is_an_error_of_the_manager(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=r"gs:// cannot be: ImportError: .*gcsfs.*permissions: gs://a-bucket/run"):
        checkpoint.manager("gs://a-bucket/run")
    assert list(tmp_path.iterdir()) == []


def test_a_file_url_is_a_local_folder(tmp_path):
    url = f"file://{tmp_path}/a%20run"
    with checkpoint.manager(url) as steps:
        checkpoint.save(steps, 4, params=PARAMS, opt_state=())
        assert_moved(checkpoint.restore(steps, None, params=PARAMS).params, PARAMS)
    assert sorted(x.name for x in (tmp_path / "a run").iterdir()) == [".writer", "4"]
    assert checkpoint.restore(f"{url}/4", None, params=PARAMS).step is None
    assert checkpoint.read_metadata(url)["format"] == 1
    with pytest.raises(ValueError, match="must name a file of this host, as file:///data/run"):
        checkpoint.manager("file://other/run")


@pytest.mark.parametrize("name", ["run", "./a:b", "a b/%20", "c:/run"])
def test_local_names_stay_as_they_are(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert places.folder(name) == tmp_path / name == places.folder(pathlib.Path(name))


IN_A_BUCKET = """
import fsspec, jax.numpy as jnp, numpy as np, os, optax
import jaxmp
from jaxmp import checkpoint

url, tx = "gs://a-bucket/runs/1", jaxmp.mixed_precision(optax.adam(1e-3), "bf16")
params = {"w": jnp.arange(8.0, dtype=jnp.bfloat16)}
with checkpoint.manager(url, max_to_keep=2) as steps:
    for i in range(3):
        checkpoint.save(steps, i, params=params, opt_state=tx.init(params), extra={"n": i}, policy="bf16")
    found = checkpoint.restore(steps, tx, params=params, extra={"n": 0})
    assert (found.step, found.extra) == (2, {"n": 2}) and np.array_equal(found.params["w"], params["w"])
assert checkpoint.restore(url, tx, params=params).step == 2 and checkpoint.restore(url + "/1", tx, params=params)
assert checkpoint.read_metadata(url)["policy"].startswith("params=bfloat16")

files = fsspec.filesystem("gcs").store
arrays = [name for name in files if name.startswith("/a-bucket/runs/1/2/state/d/")]
files[max(arrays, key=lambda name: len(files[name].getvalue()))].getbuffer()[40] ^= 4
try:
    checkpoint.restore(url, tx, params=params)
except ValueError as e:
    assert "damaged" in str(e) and "newest whole one is 1" in str(e), e
else:
    raise AssertionError("a damaged step was restored")
del files["/a-bucket/runs/1/2/commit_success.txt"]  # as of a job that was killed while it saved
assert checkpoint.restore(url, tx, params=params).step == 1
assert os.listdir(".") == []
"""


def test_a_bucket_holds_steps_with_records_and_checksums(tmp_path):
    """Of a storage in memory: Orbax writes arrays by tensorstore, over HTTP, and all else by fsspec."""
    script = tmp_path / "job.py"
    script.write_text(IN_A_BUCKET)
    (tmp_path / "empty").mkdir()
    command = [sys.executable, str(ROOT / "tests" / "support" / "fake_gcs.py"), str(script)]
    env = compiled_quickly(os.environ) | {"PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    ended = subprocess.run(command, env=env, cwd=tmp_path / "empty", capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-3000:]
