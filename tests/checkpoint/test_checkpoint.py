"""Checkpoints on disk: what is saved comes back, elsewhere and in another precision, whoever was killed meanwhile."""

import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from helpers import ROOT, assert_exact, assert_moved, compiled_quickly
from jaxmp import checkpoint
from jaxmp._src.checkpoint import writer

INNER = optax.chain(optax.adam(1e-2), jaxmp.ema_params(0.9))
PARAMS = {
    "dense": {"kernel": jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)},
    "norm": jnp.ones(4),
}
POLICY = jaxmp.get_policy("bf16", keep_fp32=("norm",))
TX = jaxmp.mixed_precision(INNER, POLICY, remainder_bits=16, loss_scale=jaxmp.DynamicLossScale(4.0))
FP32 = jaxmp.mixed_precision(INNER, "fp32")


@functools.cache
def trained(tx=TX, policy=POLICY):
    """(params, opt_state) after a step."""
    params, opt_state = jax.jit(lambda: (policy.cast_to_param(PARAMS), tx.init(PARAMS)))()
    jaxmp.get_loss_scale(())  # the gradients are made by hand
    return jax.jit(lambda p, s: jaxmp.apply_gradients(tx, jax.tree.map(jnp.copy, p), s, p))(params, opt_state)


EXTRA = {"batch_stats": {"mean": jnp.arange(3.0)}, "key": jax.random.key(7), "step": jnp.int32(5)}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """A manager with one trained step."""
    with checkpoint.manager(tmp_path_factory.mktemp("steps") / "run", max_to_keep=2) as manager:
        record = {"policy": POLICY, "loss_scale": jaxmp.DynamicLossScale(4.0), "recipe": jaxmp.fp8.DelayedScaling()}
        params, opt_state = trained()
        assert checkpoint.save(
            manager, 5, params=params, opt_state=opt_state, extra=EXTRA, metadata={"run": "a"}, **record
        )
        manager.wait_until_finished()
        yield manager


def abstract(tree, sharding=None):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)


def test_a_job_comes_back_bit_for_bit(steps):
    restored = checkpoint.restore(steps, TX, params=abstract(trained()[0]), extra=EXTRA)
    assert restored.step == 5
    assert_moved((restored.params, restored.opt_state), trained())
    assert_moved(restored.extra, EXTRA)
    assert not any(x.committed for x in jax.tree.leaves(restored.params))  # free to follow others
    jax.tree.map(lambda x: x.delete(), restored[1:])  # and no buffer is shared


def test_onto_another_mesh_and_back(steps, tmp_path):
    mesh = jax.make_mesh((4, 2), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    split, everywhere = NamedSharding(mesh, P("x", "y")), NamedSharding(mesh, P())
    like = {"dense": abstract(trained()[0]["dense"], split), "norm": abstract(trained()[0]["norm"], everywhere)}
    params, opt_state = checkpoint.restore(steps, TX, params=like)[1:3]
    assert_moved(jax.tree.map(np.asarray, (params, opt_state)), jax.tree.map(np.asarray, trained()))
    for tree in (params, *(optax.tree.get(opt_state, name) for name in ("master_params", "mu", "ema_params"))):
        (kernel,) = jax.tree.leaves(tree["dense"])
        assert kernel.sharding == split
        assert all(x.sharding == everywhere for x in jax.tree.leaves(tree["norm"]))
    assert all(x.sharding == everywhere for x in jax.tree.leaves(opt_state.scaling))
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=params, opt_state=opt_state)
        manager.wait_until_finished()
        assert_moved(checkpoint.restore(manager, TX, params=abstract(trained()[0]))[1:3], trained())


@pytest.mark.thorough(0)
def test_moments_in_8_bits_lie_as_their_param(tmp_path):
    """Codes and their scales; scales that the devices do not divide are whole."""
    tx = jaxmp.mixed_precision(jaxmp.fused_adamw(1e-2, state_dtype=jnp.int8), "fp32")
    params = {"a": jnp.ones((16, 256)), "b": jnp.ones((32, 256))}
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    shardings = {"a": NamedSharding(mesh, P("x")), "b": NamedSharding(mesh, P(None, "x"))}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=params, opt_state=tx.init(params))
        manager.wait_until_finished()
        like = jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), params, shardings)
        restored = checkpoint.restore(manager, tx, params=like)
    expected = jax.tree.leaves(jaxmp.sharding_of(tx, params, shardings))
    for x, sharding in zip(jax.tree.leaves(restored.opt_state), expected, strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    shapes = [x.addressable_shards[0].data.shape for x in optax.tree.get(restored.opt_state, "nu")["a"]]
    assert shapes == [(4, 256), (4, 1)]


def test_into_another_policy_as_convert_does_it(steps):
    params, opt_state = checkpoint.restore(steps, FP32, params=PARAMS)[1:3]
    assert_exact((params, opt_state), checkpoint.convert(trained()[1], trained()[0], to=FP32, policy="fp32"))
    assert_exact(params, jaxmp.get_master_params(trained()[1], trained()[0]))


def test_params_alone_come_from_the_masters(steps):
    restored = checkpoint.restore(steps, None, params=PARAMS)
    assert restored.opt_state is None
    assert_exact(restored.params, jaxmp.get_master_params(trained()[1], trained()[0]))


def test_what_orbax_saves_itself_is_read(tmp_path):
    params, opt_state = trained()
    state = jaxmp.linen.TrainState.create(apply_fn=None, params=PARAMS, tx=TX, policy=POLICY)
    state = state.replace(params=params, opt_state=opt_state)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "pair", (params, opt_state))
        saver.save(tmp_path / "state", state)
    for name in ("pair", "state"):
        restored = checkpoint.restore(tmp_path / name, TX, params=abstract(params))
        assert restored.step is None
        assert_moved(restored[1:3], trained())
        assert checkpoint.read_metadata(tmp_path / name) == {}
    with ocp.CheckpointManager(tmp_path / "steps") as manager:
        manager.save(3, args=ocp.args.StandardSave({"params": params, "opt_state": opt_state}))
        manager.wait_until_finished()
        assert_moved(checkpoint.restore(manager, TX, params=abstract(params))[:3], (3, *trained()))


def test_what_is_saved_here_is_read_by_orbax(steps):
    target = {"params": abstract(trained()[0]), "opt_state": abstract(trained()[1]), **EXTRA}
    with ocp.CheckpointManager(steps.directory) as plain:
        restored = plain.restore(5, args=ocp.args.Composite(state=ocp.args.StandardRestore(target)))
    assert_moved((restored.state["params"], restored.state["opt_state"]), trained())


def test_the_record_says_what_it_was_made_with(steps):
    about = checkpoint.read_metadata(steps)
    assert jaxmp.get_policy(about["policy"], keep_fp32=about["keep_fp32"]) == POLICY
    assert about["recipe"]["recipe"] == "DelayedScaling" and about["recipe"]["amax_history_len"] == 1024
    assert "growth_interval=2000" in about["loss_scale"] and about["metadata"] == {"run": "a"}
    assert about == json.loads(json.dumps(about))
    assert checkpoint.read_metadata(pathlib.Path(steps.directory) / "5") == about


LEAF = "fp8_lhs_e4m3_log2_scale"


@functools.cache
def numbered_layers():
    """(tx, params, opt_state) of twelve fp8 layers, whose amaxes tell which is which."""
    params = {n: {LEAF: jnp.float32(0.0), "w": jnp.ones(())} for n in range(12)}
    tx = jaxmp.mixed_precision(optax.identity(), "fp32", recipe=jaxmp.fp8.DelayedScaling(amax_history_len=2))
    grads = {n: {LEAF: jnp.float32(n + 1), "w": jnp.zeros(())} for n in params}
    return tx, *jax.jit(lambda *args: jaxmp.apply_gradients(tx, *args))(grads, tx.init(params), params)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("recorded", [True, False], ids=["recorded", "orbax-alone"])
def test_histories_stay_with_their_layers_where_keys_are_numbers(recorded, tmp_path):
    """Orbax makes strings of numbers, and "10" sorts before "2"."""
    tx, params, opt_state = numbered_layers()
    with checkpoint.manager(tmp_path / "a") as manager:
        if recorded:
            checkpoint.save(manager, 0, params=params, opt_state=opt_state)
        else:
            manager.save(0, args=ocp.args.Composite(state=ocp.args.StandardSave((params, opt_state))))
        manager.wait_until_finished()
        assert_moved(checkpoint.restore(manager, tx, params=abstract(params))[1:3], (params, opt_state))
        if recorded:  # a model with fewer layers in fp8
            like = {n: layer if n in (2, 10) else {"w": layer["w"]} for n, layer in params.items()}
            (group,) = optax.tree.get(checkpoint.restore(manager, tx, params=like).opt_state, "amax_states")
            assert group.amax_history[-1].tolist() == [3.0, 11.0]


# Errors: each before an array is read


def test_another_model_is_named_by_its_first_leaf(steps):
    with pytest.raises(
        ValueError, match="must be of this model; head is in the model and not in the checkpoint. There"
    ):
        checkpoint.restore(steps, TX, params=PARAMS | {"head": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"norm has shape \(4,\) in the checkpoint and \(5,\) in the model"):
        checkpoint.restore(steps, TX, params=PARAMS | {"norm": jnp.ones(5)})
    with pytest.raises(ValueError, match="same inner optimizer.*; 0/trace/dense/kernel is missing"):
        checkpoint.restore(steps, jaxmp.mixed_precision(optax.sgd(0.1, momentum=0.9), "fp32"), params=PARAMS)
    with pytest.raises(ValueError, match="every tree of extra=; 'ema' is not among batch_stats, key"):
        checkpoint.restore(steps, TX, params=trained()[0], extra={"ema": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"batch_stats/mean is float32\[3\], expected float32\[4\]"):
        checkpoint.restore(steps, TX, params=trained()[0], extra={"batch_stats": {"mean": jnp.ones(4)}})


def test_the_axis_of_pmaps_devices_is_explained(steps, tmp_path):
    message = r"If the first axis is that of pmap's devices, .* flax.jax_utils.unreplicate\(.* before save and restore"
    replicas = jax.tree.map(lambda x: jnp.stack([x] * 2), PARAMS)
    with pytest.raises(ValueError, match=rf"in the checkpoint and \(2, .* in the model\. {message}"):
        checkpoint.restore(steps, TX, params=replicas)
    with checkpoint.manager(tmp_path / "replicas") as manager:
        opt_state = jax.tree.map(lambda x: jnp.stack([x] * 2), TX.init(PARAMS))
        checkpoint.save(manager, 0, params=replicas, opt_state=opt_state)
        manager.wait_until_finished()
        with pytest.raises(ValueError, match=rf"shape \(2, .* in the checkpoint .* in the model\. {message}"):
            checkpoint.restore(manager, TX, params=PARAMS)
        with pytest.raises(ValueError, match=rf"has shape \(2,\) there, expected \(\)\. {message}"):
            checkpoint.restore(manager, TX, params=replicas)


def test_a_model_without_leaves_is_said_to_have_none(tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params={}, opt_state=())
        manager.wait_until_finished()
        with pytest.raises(ValueError, match="w is in the model and not in the checkpoint. There are no leaves."):
            checkpoint.restore(manager, None, params={"w": jnp.ones(2)})


def test_nothing_there(tmp_path, steps):
    with pytest.raises(ValueError, match="must be a folder that Orbax wrote; there is no folder at .*nowhere"):
        checkpoint.restore(tmp_path / "nowhere", TX, params=PARAMS)
    with pytest.raises(ValueError, match="no complete checkpoint of step 9 in .*; complete steps: 5"):
        checkpoint.restore(steps, TX, params=PARAMS, step=9)
    with checkpoint.manager(tmp_path / "empty") as empty, pytest.raises(ValueError, match="no complete .*: none"):
        checkpoint.restore(empty, TX, params=PARAMS)
    (tmp_path / "empty" / ".writer").write_text("process 1")
    (tmp_path / "empty" / "3.orbax-checkpoint-tmp").mkdir()
    with pytest.raises(ValueError, match="no complete checkpoint in .*empty: nothing was saved there, or no save has"):
        checkpoint.restore(tmp_path / "empty", TX, params=PARAMS)


def test_files_of_something_else(tmp_path):
    (tmp_path / "notes.txt").write_text("no checkpoint")
    with pytest.raises(ValueError, match="must be complete and written by Orbax; .* cannot be read"):
        checkpoint.restore(tmp_path, TX, params=PARAMS)
    with ocp.StandardCheckpointer() as saver:
        saver.save(tmp_path / "other", {"weights": jnp.ones(2)})
        saver.save(tmp_path / "model", {"params": trained()[0]})
    with pytest.raises(ValueError, match="has a dict with weights. Restore it with Orbax"):
        checkpoint.restore(tmp_path / "other", TX, params=PARAMS)
    with pytest.raises(ValueError, match="has only params. .* pass tx=None and call tx.init"):
        checkpoint.restore(tmp_path / "model", TX, params=PARAMS)


@pytest.mark.thorough(0)
@pytest.mark.parametrize("cases", [8, pytest.param(1000, marks=pytest.mark.thorough(0))])
def test_no_damage_is_restored_in_silence(cases, tmp_path):
    """Flipped bits, files cut off, zeros, deleted files: an error, or what was saved."""
    script = ROOT / "tests" / "support" / "corruption.py"  # in a process of its own: Orbax's threads are loud
    command = [sys.executable, str(script), "--cases", str(cases), "--json", str(tmp_path / "out")]
    ended = subprocess.run(command, env=compiled_quickly(os.environ), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    record = json.loads((tmp_path / "out").read_text())
    assert record["silently_wrong"] == 0 and record["other_errors"] == []
    assert sum(record["outcomes"].values()) == cases
    assert sum(n for what, n in record["outcomes"].items() if "an error" in what) >= cases // 2


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 4
    file.write_bytes(data)


def test_a_flipped_bit_is_named_by_its_leaf(tmp_path):
    params = {"w": noise(), "b": jnp.ones(3)}
    with checkpoint.manager(tmp_path, max_to_keep=None) as manager:
        for step in (1, 2, 3):
            checkpoint.save(manager, step, params=params, opt_state=(), policy="bf16")
        manager.wait_until_finished()
        for step in (2, 3):
            file = max((tmp_path / str(step) / "state").rglob("*"), key=lambda x: x.stat().st_size)
            flip(file, file.stat().st_size // 2)
        told = r"the files in .*/3/state are damaged.* for 1 of the leaves .params/w.. Other steps there: 1, 2 "
        with pytest.raises(ValueError, match=told + r"\(step=\); the newest whole one is 1"):
            checkpoint.restore(manager, None, params=params)


def noise():
    return jnp.asarray(np.random.default_rng(0).normal(size=(256, 256)), jnp.float32)


def test_a_full_disk_is_an_error_and_the_step_before_stays(tmp_path):
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    params = {"w": noise()}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 1, params=params, opt_state=())
        manager.wait_until_finished()
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, hard))  # no file can be larger: writes fail as on a full disk
        try:
            with pytest.raises(ValueError, match="Failed writing"):
                checkpoint.save(manager, 2, params=params, opt_state=())
                manager.wait_until_finished()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert manager.all_steps() == [1]
        assert checkpoint.restore(manager, None, params=params).step == 1
        checkpoint.save(manager, 3, params=params, opt_state=())
        manager.wait_until_finished()
        assert checkpoint.restore(manager, None, params=params).step == 3


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        checkpoint.manager(tmp_path / "file" / "run")


def test_one_process_at_a_time_saves_into_a_directory(tmp_path):
    """The second one is told, and the first goes on; when the first closes, or ends, the directory is free."""
    params = {"w": jnp.ones(3)}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 1, params=params, opt_state=())
        manager.wait_until_finished()
        assert holds(tmp_path) == "refused"
        with checkpoint.manager(tmp_path, read_only=True) as reader:
            assert checkpoint.restore(reader, None, params=params).step == 1
        with checkpoint.manager(tmp_path) as other:  # one more of this process, which closes before the first
            checkpoint.save(other, 2, params=params, opt_state=())
        shutil.copytree(tmp_path, tmp_path.parent / "copy")  # opens and closes the file of the lock
        assert holds(tmp_path) == "refused"
    assert holds(tmp_path) == "free"
    with pytest.MonkeyPatch.context() as patch:  # another process has the lock of this one's next manager
        patch.setattr(writer.fcntl, "flock", refuse)
        with checkpoint.manager(tmp_path) as other, pytest.raises(ValueError, match="has another writer .process"):
            checkpoint.save(other, 3, params=params, opt_state=())


def test_a_manager_that_only_reads_refuses_to_save_and_to_delete(tmp_path):
    """It took the lock of the writer, or met it; and Orbax's own save did nothing, and said nothing."""
    params = {"w": jnp.ones(3)}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 1, params=params, opt_state=())
    refused = pytest.raises(ValueError, match="read_only=True neither saves nor deletes; got .*without read_only=")
    with checkpoint.manager(tmp_path, read_only=True) as reader:
        with refused:
            checkpoint.save(reader, 2, params=params, opt_state=())
        with refused:
            reader.delete(1)
        assert holds(tmp_path) == "free"
        assert checkpoint.restore(reader, None, params=params).step == 1


@pytest.mark.thorough(0)
@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_fork_does_not_keep_the_lock_of_its_parent(tmp_path):
    """As a worker that loads data, and outlives the job."""
    code = (
        "import os, sys, time, warnings, jax.numpy as jnp\n"
        "from jaxmp import checkpoint\n"
        "warnings.simplefilter('ignore')\n"
        "steps = checkpoint.manager(sys.argv[1])\n"
        "checkpoint.save(steps, 1, params={'w': jnp.ones(2)}, opt_state=())\n"
        "steps.wait_until_finished()\n"
        "if not os.fork(): time.sleep(20); os._exit(0)\n"
        "time.sleep(0.2); os.kill(os.getpid(), 9)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    subprocess.run(command, env=compiled_quickly(os.environ), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    assert holds(tmp_path) == "free"


def test_what_killed_saves_left_is_gone_with_the_next_save(tmp_path):
    """Steps that no later run saves again stayed for good."""
    for name in ("3.orbax-checkpoint-tmp", "7.orbax-checkpoint-tmp"):
        (tmp_path / name / "state").mkdir(parents=True)
        (tmp_path / name / "state" / "half").write_text("x")
    with checkpoint.manager(tmp_path) as manager:
        assert len(list(tmp_path.glob("*-tmp"))) == 2  # one that only reads removes nothing
        checkpoint.save(manager, 8, params={"w": jnp.ones(3)}, opt_state=())
    assert sorted(x.name for x in tmp_path.iterdir()) == [".writer", "8"]


KILLED_WHILE_IT_SAVES = """
import os, pathlib, sys, threading, time
import jax.numpy as jnp
from jaxmp import checkpoint

def kill():
    while not any((directory / "7.orbax-checkpoint-tmp").glob("state/*")):
        time.sleep(0.001)
    os.kill(os.getpid(), 9)

directory, step = pathlib.Path(sys.argv[1]), int(sys.argv[2])
params = {f"w{i}": jnp.full((256, 256), step) for i in range(30)}
manager = checkpoint.manager(directory)
if manager.latest_step() is not None:
    checkpoint.restore(manager, None, params=params)
if step == 7:
    threading.Thread(target=kill, daemon=True).start()
checkpoint.save(manager, step, params=params, opt_state=())
manager.wait_until_finished()
"""


@pytest.mark.thorough(0)
def test_after_a_kill_in_a_save_the_next_run_is_quiet_and_leaves_nothing(tmp_path):
    """Also where it saves other steps than the one that was killed."""
    for step, code in ((3, 0), (7, -9), (9, 0)):
        command = [sys.executable, "-c", KILLED_WHILE_IT_SAVES, str(tmp_path), str(step)]
        ended = subprocess.run(command, env=compiled_quickly(os.environ), capture_output=True, text=True, timeout=120)
        assert (ended.returncode, ended.stderr) == (code, "")
        assert (tmp_path / "7.orbax-checkpoint-tmp").exists() == (step == 7)
    assert sorted(x.name for x in tmp_path.iterdir()) == [".writer", "3", "9"]


@pytest.mark.parametrize("by", ["delete", "max_to_keep"])
def test_a_kill_while_a_step_is_deleted_leaves_no_half_of_it(by, tmp_path, monkeypatch):
    """After a roll-back the half was the newest step, and `restore` took it or called it damaged."""
    params, unlink, deleted = {"w": jnp.ones(3)}, os.unlink, []

    def killed(path, **options):
        if deleted:
            raise KeyboardInterrupt
        deleted.append(path)
        unlink(path, **options)

    with checkpoint.manager(tmp_path, max_to_keep=2) as manager:
        for step in (1, 2):
            checkpoint.save(manager, step, params=params, opt_state=())
            manager.wait_until_finished()
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", killed)
            with pytest.raises(KeyboardInterrupt):
                if by == "delete":
                    manager.delete(2)
                else:
                    checkpoint.save(manager, 3, params=params, opt_state=())
                    manager.wait_until_finished()
        left = [1] if by == "delete" else [2, 3]
        assert deleted and sorted(int(x.name) for x in tmp_path.iterdir() if x.name.isdigit()) == left
        assert checkpoint.restore(tmp_path, None, params=params).step == left[-1]
        assert list((tmp_path / writer.DELETED).iterdir())
    assert not (tmp_path / writer.DELETED).exists()  # gone with the next thing that the manager did


def test_steps_that_a_killed_process_was_deleting_go_with_the_next_save(tmp_path):
    (tmp_path / writer.DELETED / "4").mkdir(parents=True)
    with checkpoint.manager(tmp_path, read_only=True) as manager:
        assert manager.all_steps() == []
        manager.wait_until_finished()
    assert (tmp_path / writer.DELETED / "4").exists()  # a writer may just be putting it aside
    with checkpoint.manager(tmp_path) as manager:
        assert manager.all_steps() == []
        checkpoint.save(manager, 4, params={"w": jnp.ones(3)}, opt_state=())
        manager.wait_until_finished()
        manager.delete(4)
        checkpoint.save(manager, 4, params={"w": jnp.ones(3)}, opt_state=())
    assert sorted(x.name for x in tmp_path.iterdir()) == [".writer", "4"]
    with pytest.MonkeyPatch.context() as patch:  # another process has the lock
        patch.setattr(writer.fcntl, "flock", refuse)
        with checkpoint.manager(tmp_path) as other, pytest.raises(ValueError, match="has another writer .process"):
            other.delete(4)


def test_an_array_that_was_donated_is_named(tmp_path):
    params, state = {"a": {"w": jnp.ones(3)}}, {"count": jnp.zeros(3)}
    jax.jit(lambda x: x + 1, donate_argnums=0)(params["a"]["w"])
    with checkpoint.manager(tmp_path) as manager:
        with pytest.raises(ValueError, match=r"params/a/w was deleted: it was donated to a step .*Save what the step"):
            checkpoint.save(manager, 8, params=params, opt_state=state)
        with pytest.raises(ValueError, match="data/w was deleted"):
            checkpoint.save(manager, 8, params={}, opt_state=(), extra={"data": params["a"]})
        assert manager.all_steps() == []


def refuse(*_):
    raise BlockingIOError


def holds(directory):
    """Asks, from a process of its own, whether the lock of a directory can be had."""
    code = (
        "import fcntl, sys\n"
        "try: fcntl.flock(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except BlockingIOError: print('refused')\n"
        "else: print('free')"
    )
    command = [sys.executable, "-c", code, str(directory / writer._LOCK)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_closed_manager_saves_nothing_and_says_so(tmp_path):
    """It returned True, wrote nothing, and the process hung at its end."""
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 1, params={"w": jnp.ones(3)}, opt_state=())
    with pytest.raises(ValueError, match=r"saves until it is closed; the one of .* is closed: its `with` has ended.*"):
        checkpoint.save(manager, 2, params={"w": jnp.ones(3)}, opt_state=())
    assert manager.all_steps() == [1] and checkpoint.restore(manager, None, params={"w": jnp.ones(3)}).step == 1


NEVER_CLOSED = """
import os, sys, threading, time
import jax.numpy as jnp
from jaxmp import checkpoint

def save(step):
    params = {f"w{i}": jnp.full((512, 512), step) for i in range(8)}  # enough that the end of the program comes first
    checkpoint.save(manager, step, params=params, opt_state=())

end, directory = sys.argv[1:]
manager = checkpoint.manager(directory)
save(1)
if end == "a thread that runs on":
    threading.Thread(target=lambda: (time.sleep(0.5), save(2))).start()
else:
    save(2)
if end == "an exception":
    raise KeyError("the user's")
if end == "sys.exit":
    sys.exit(3)
"""


@pytest.mark.thorough(0)
@pytest.mark.parametrize(
    ("end", "code", "told", "saved"),
    [
        ("its last line", 0, "", [1, 2]),
        ("an exception", 1, 'KeyError: "the user\'s"', [1, 2]),
        ("sys.exit", 3, "", [1, 2]),
        ("a thread that runs on", 0, "ValueError: steps are saved while the main thread runs", [1]),
    ],
)
def test_a_program_that_closes_no_manager_loses_no_save(end, code, told, saved, tmp_path):
    """The last step was lost: only Orbax's log said so, and some programs hung."""
    command = [sys.executable, "-c", NEVER_CLOSED, end, str(tmp_path / "steps")]
    ended = subprocess.run(command, env=compiled_quickly(os.environ), capture_output=True, text=True, timeout=120)
    assert ended.returncode == code, ended.stderr
    assert told in ended.stderr and (told or not ended.stderr)
    assert sorted(int(x.name) for x in (tmp_path / "steps").iterdir() if x.name.isdigit()) == saved
    assert not list((tmp_path / "steps").glob("*tmp"))


def test_the_end_of_a_program_closes_managers_and_shows_a_save_that_failed(tmp_path, monkeypatch):
    """In the process that made them; and one that fails does not keep others from their end."""
    ends, shown, params = [], [], {"w": jnp.ones(3)}
    monkeypatch.setattr(writer, "_SAVES_END_LATE", True)
    monkeypatch.setattr(writer, "_at_exit", ends.append)
    monkeypatch.setattr(sys, "excepthook", lambda *args: shown.append(args))
    with checkpoint.manager(tmp_path / "a") as closed:
        checkpoint.save(closed, 1, params=params, opt_state=())
    manager = checkpoint.manager(tmp_path / "b")
    for step in (1, 2):
        checkpoint.save(manager, step, params=params, opt_state=())
    assert len(ends) == 2  # one for each manager
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)  # a fork, which has none of its threads
        ends[1]()
        assert not manager._is_closed
    with monkeypatch.context() as patch:
        patch.setattr(type(manager), "wait_until_finished", lambda _: 1 / 0)
        ends[0](), ends[1]()
    assert manager._is_closed and holds(tmp_path / "b") == "free"
    manager.close()
    assert manager.all_steps() == [1, 2]
    ((kind, error, _),) = shown
    assert kind is ValueError and isinstance(error.__cause__, ZeroDivisionError)
    assert re.match(r"a save must end before its program does; the last one into .*/b failed, and its", str(error))


def test_files_are_on_the_disk_before_a_step_gets_its_name(tmp_path, monkeypatch):
    """Each file that stands in the step was brought to the disk, while the folder had another name."""
    synced = []
    monkeypatch.setattr(writer, "sync", lambda path: synced.append(path))
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 4, params={"w": jnp.ones(3)}, opt_state=())
        manager.wait_until_finished()
    *before, last = synced
    assert last == tmp_path and all(path.parts[len(tmp_path.parts)] == "4.orbax-checkpoint-tmp" for path in before)
    known = {path.relative_to(tmp_path / "4.orbax-checkpoint-tmp") for path in before}
    step = tmp_path / "4"
    there = {path.relative_to(step) for path in step.rglob("*") if path.is_file()}
    assert there - known == {pathlib.Path("commit_success.txt")}  # of no content


@pytest.mark.thorough(1)
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_files_are_an_error_that_names_the_other_steps(damage, tmp_path):
    params = {"w": jnp.arange(5.0)}  # one array: where several reads fail, Orbax's event loop is closed before the last
    with checkpoint.manager(tmp_path, max_to_keep=None) as manager:
        for step in (1, 2):
            checkpoint.save(manager, step, params=params, opt_state=())
        manager.wait_until_finished()
        for file in (tmp_path / "2" / "state").glob("**/d/*"):
            os.truncate(file, file.stat().st_size // 2) if damage == "cut" else file.unlink()
        with pytest.raises(ValueError, match=r"damaged, incomplete, or no checkpoint. Other steps there: 1 \(step=\)"):
            checkpoint.restore(manager, None, params=params)
        assert_moved(checkpoint.restore(manager, None, params=params, step=1).params, params)


@pytest.mark.thorough(1)
@pytest.mark.parametrize("damage", ["cut", "empty", "no object", "missing"])
def test_a_damaged_record_is_an_error_that_names_the_other_steps(damage, tmp_path):
    params = {"w": jnp.arange(5.0)}
    with checkpoint.manager(tmp_path, max_to_keep=None) as manager:
        for step in (1, 2):
            checkpoint.save(manager, step, params=params, opt_state=())
        manager.wait_until_finished()
        file = tmp_path / "2" / "jaxmp" / "metadata"
        text = file.read_text()
        file.unlink()
        if damage != "missing":
            file.write_text({"cut": text[: len(text) // 2], "empty": "", "no object": "[]"}[damage])
        told = r"2/jaxmp cannot be read: it is damaged, incomplete, or no checkpoint. Other steps there: 1 \(step=\)"
        with pytest.raises(ValueError, match=told):
            checkpoint.restore(manager, None, params=params)
        with pytest.raises(ValueError, match=told):
            checkpoint.read_metadata(manager)
        assert_moved(checkpoint.restore(manager, None, params=params, step=1).params, params)


class Small(nnx.Module):
    def __init__(self, seed):
        self.dense = nnx.Linear(4, 4, rngs=nnx.Rngs(seed))

    def __call__(self, x):
        return self.dense(x)


def test_modules_of_nnx_go_on(tmp_path):
    policy, tx = jaxmp.get_policy("bf16"), jaxmp.mixed_precision(optax.adam(1e-2), "bf16")

    def made(seed):
        model = Small(seed)
        return model, jaxmp.nnx.Optimizer(model, tx, wrt=nnx.Param, policy=policy)

    model, optimizer = made(0)
    step = nnx.jit(lambda model, optimizer, grads: optimizer.update(model, grads))
    step(model, optimizer, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))
    other, fresh = made(1)
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=nnx.state(model, nnx.Param), opt_state=nnx.as_pure(optimizer.opt_state))
        manager.wait_until_finished()
        restored = checkpoint.restore(manager, tx, params=nnx.state(other, nnx.Param))
    nnx.update(other, restored.params)
    variables = jax.tree.leaves(fresh.opt_state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    for variable, value in zip(variables, jax.tree.leaves(restored.opt_state), strict=True):
        variable.set_value(value)
    for before, after in ((model, other), (optimizer.opt_state, fresh.opt_state)):
        pure = [nnx.as_pure(nnx.state(x)) if isinstance(x, nnx.Module) else nnx.as_pure(x) for x in (before, after)]
        assert_moved(pure[1], pure[0])


NUMBERS = {
    "step": 3,
    "rate": 0.1,
    "done": True,
    "seen": np.int64(2**40),
    "at": np.arange(3) + 2**40,
    "z": np.float64(0.1),
}


def test_numbers_come_back_as_they_were_saved(tmp_path):
    """Python's as Python's, NumPy's as NumPy's in 64 bits, whether or not jax has 64 bits."""
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params={"w": jnp.ones(2)}, opt_state=(), extra={"data": NUMBERS, "step": 7})
        manager.wait_until_finished()
        found = checkpoint.restore(manager, None, params={"w": jnp.ones(2)}, extra={"data": NUMBERS, "step": 0}).extra
        assert found["step"] == 7 and type(found["step"]) is int
        assert {name: type(x) for name, x in found["data"].items()} == {name: type(x) for name, x in NUMBERS.items()}
        assert_moved(*(jax.tree.map(np.asarray, x) for x in (found["data"], NUMBERS)))
        assert checkpoint.restore(manager, None, params={"w": jnp.ones(2)}).extra == {}
        with pytest.raises(ValueError, match=r"saved numbers; step is int64\[\], expected a number of Python .float"):
            checkpoint.restore(manager, None, params={"w": jnp.ones(2)}, extra={"step": 0.0})
        with pytest.raises(ValueError, match=r"data/rate is float64\[\], expected a number of Python .int"):
            checkpoint.restore(manager, None, params={"w": jnp.ones(2)}, extra={"data": NUMBERS | {"rate": 1}})


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({"a": {"b": [1, np.ones(2)]}}, "values that JSON can hold.*got ndarray at metadata/a/b/1"),
        ({"a": np.float32(1)}, "got float32 at metadata/a.*float"),
        ({"a": {1: 2}}, r"JSON turns others into text; got 1 \(int\) at metadata/a. Write '1'"),
    ],
    ids=["array", "scalar", "name"],
)
def test_metadata_that_json_cannot_hold_is_refused_before_anything_is_written(metadata, told, tmp_path):
    with checkpoint.manager(tmp_path) as manager:
        with pytest.raises(ValueError, match=told):
            checkpoint.save(manager, 0, params={"w": jnp.ones(2)}, opt_state=(), metadata=metadata)
        with pytest.raises(ValueError, match="arrays and numbers; got str at name"):
            checkpoint.save(manager, 0, params={"w": jnp.ones(2)}, opt_state=(), extra={"name": "a"})
    assert [x.name for x in tmp_path.iterdir()] in ([], [writer._LOCK])


def test_arrays_without_elements_are_saved(tmp_path):
    """A layer of no units trains; Orbax refuses to save it."""
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    tx = jaxmp.mixed_precision(optax.adam(1e-2), "bf16")
    params32 = {"none": jnp.zeros((0, 4)), "w": jnp.ones((4, 2))}
    params, opt_state = jaxmp.get_policy("bf16").cast_to_param(params32), tx.init(params32)
    extra = {"seen": np.zeros((3, 0), np.int64), "order": jnp.zeros(0, jnp.int32)}
    with checkpoint.manager(tmp_path) as manager:
        checkpoint.save(manager, 0, params=params, opt_state=opt_state, extra=extra)
        manager.wait_until_finished()
        restored = checkpoint.restore(manager, tx, params=params, extra=extra)
        assert_moved((restored.params, restored.opt_state, restored.extra), (params, opt_state, extra))
        split = NamedSharding(mesh, P("data"))
        there = checkpoint.restore(manager, tx, params=jax.device_put(params, split))
        assert there.params["none"].sharding.is_equivalent_to(split, 2) and there.params["none"].shape == (0, 4)
        with pytest.raises(ValueError, match=r"none has shape \(0, 4\) in the checkpoint and \(1, 1\) in the model"):
            checkpoint.restore(manager, tx, params=params | {"none": jnp.zeros((1, 1), jnp.bfloat16)})
        assert "empty" not in checkpoint.read_metadata(manager)


KEYS = {name: jax.random.split(jax.random.key(7, impl=name), 3) for name in ("threefry2x32", "rbg")}


@pytest.fixture(scope="module")
def with_keys(tmp_path_factory):
    """(directory, tx, params, opt_state, extra) of a step with keys everywhere, also arrays of none."""
    tx = jaxmp.mixed_precision(optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(1)), optax.adam(1e-2)), "bf16")
    params32 = {"w": jnp.ones(4), "key": KEYS["rbg"]}
    opt_state = tx.init({"w": params32["w"]})
    extra = {"keys": KEYS, "none": jax.tree.map(lambda x: x[:0].reshape(0, 2), KEYS)}
    directory = tmp_path_factory.mktemp("keys")
    with checkpoint.manager(directory) as manager:
        checkpoint.save(manager, 0, params=params32, opt_state=opt_state, extra=extra)
    return directory, tx, params32, opt_state, extra


@pytest.mark.thorough(1)
@pytest.mark.parametrize("described", [False, True], ids=["arrays", "shapes"])
def test_keys_come_back_wherever_they_are(described, with_keys):
    """In the state (noise in the gradients) they came back as an error; arrays of no keys could not be saved."""
    directory, _, params, _, extra = with_keys
    like = abstract if described else lambda tree: tree
    restored = checkpoint.restore(directory, None, params=like(params), extra=like(extra))
    for found, expected in ((restored.params, params), (restored.extra, extra)):
        assert [x.dtype for x in jax.tree.leaves(found)] == [x.dtype for x in jax.tree.leaves(expected)]
        assert_moved(found, expected)
    assert "keys" not in checkpoint.read_metadata(directory)


def test_keys_in_the_state_of_an_optimizer(with_keys):
    """Also where the state has moved in the chain, and where it is converted."""
    directory, tx, params, opt_state, _ = with_keys
    of_w = {"w": params["w"]}
    restored = checkpoint.restore(directory, tx, params=of_w, partial="key")
    assert_moved(restored.opt_state, opt_state)
    assert_moved(checkpoint.convert(opt_state, of_w, to=tx, policy="bf16")[1], opt_state)
    noise = optax.add_noise(0.1, 0.5, jax.random.key(2))
    clipped = jaxmp.mixed_precision(optax.chain(optax.trace(0.9), noise, optax.adam(1e-2)), "bf16")
    moved = checkpoint.restore(directory, clipped, params=of_w, partial=["key", "*trace*"])
    assert ("0", "1") in moved.report.moved
    assert_moved(optax.tree.get(moved.opt_state, "rng_key"), jax.random.key(1))


def test_keys_of_another_kind_are_named(with_keys):
    """A job with other keys got the saved ones, of another shape or generator."""
    directory, _, params, _, extra = with_keys
    for other, got in (
        (KEYS["rbg"], r"key<rbg>\[3\]"),
        (KEYS["threefry2x32"][0], r"key<fry>\[\]"),
        (jax.random.key_data(KEYS["threefry2x32"]), r"uint32\[3, 2\]"),
    ):
        given = extra | {"keys": KEYS | {"threefry2x32": other}}
        with pytest.raises(ValueError, match=rf"shapes and dtypes; keys/threefry2x32 is key<fry>\[3\], expected {got}"):
            checkpoint.restore(directory, None, params=params, extra=given)


def test_bits_of_keys_that_were_saved_as_such(tmp_path):
    """A step of Orbax alone tells no generator: it is that of the job."""
    with ocp.CheckpointManager(tmp_path) as manager:
        tree = {"params": {"w": jnp.ones(2)}, "key": KEYS["rbg"], "bits": jax.random.key_data(KEYS["rbg"])}
        manager.save(3, args=ocp.args.StandardSave(tree))
        manager.wait_until_finished()
        for like in (KEYS["rbg"], abstract(KEYS["rbg"])):
            restored = checkpoint.restore(manager, None, params=tree["params"], extra={"key": like, "bits": like})
            assert all(x.dtype == KEYS["rbg"].dtype for x in restored.extra.values())
            assert_moved(restored.extra, {"key": KEYS["rbg"], "bits": KEYS["rbg"]})
        with pytest.raises(ValueError, match=r"key is uint32\[3, 4\], expected uint32\[2, 4\]"):
            checkpoint.restore(manager, None, params=tree["params"], extra={"key": KEYS["rbg"][:2]})


def test_names_that_are_taken(steps):
    with pytest.raises(ValueError, match="got a tree called 'params'. Rename it"):
        checkpoint.save(steps, 6, params=trained()[0], opt_state=trained()[1], extra={"params": 1})


def test_steps_only_go_up_and_a_roll_back_deletes_the_later_ones(tmp_path):
    """Orbax passes over a step that is there or older than the newest; what is saved so would be lost."""
    with checkpoint.manager(tmp_path, max_to_keep=None, save_interval_steps=2) as manager:

        def save(step, value, **options):
            return checkpoint.save(manager, step, params={"w": jnp.full(2, value)}, opt_state=(), **options)

        assert [save(step, 1.0) for step in (2, 3, 4, 6)] == [True, False, True, True]
        for step, force in ((6, False), (6, True), (4, False), (3, False), (3, True)):
            with pytest.raises(ValueError, match=rf"rising order; got {step}, and the newest step in .* is 6") as e:
                save(step, 2.0, force=force)
            later = ", ".join(f"manager.delete({n})" for n in (4, 6) if n >= step)
            assert f"first ({later}), or save into a new directory." in str(e.value)
        manager.wait_until_finished()
        assert checkpoint.restore(manager, None, params={"w": jnp.ones(2)}).params["w"].tolist() == [1.0, 1.0]
        for step in (4, 6):
            manager.delete(step)
        assert save(4, 2.0) and not save(5, 2.0)
        manager.wait_until_finished()
        restored = checkpoint.restore(manager, None, params={"w": jnp.ones(2)})
    assert restored.step == 4 and restored.params["w"].tolist() == [2.0, 2.0]


def test_a_missing_package_is_named_with_its_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'jaxmp[checkpoint]'")):
        checkpoint.manager(tmp_path)


# Kills


@pytest.mark.thorough(0)
@pytest.mark.parametrize("elastic", [False, True], ids=["one-device", "other-devices"])
@pytest.mark.parametrize("kills", [3, pytest.param(50, marks=pytest.mark.thorough(0))])
def test_killed_at_any_moment_it_goes_on_from_the_last_finished_step(kills, elastic, tmp_path):
    script = ROOT / "tests" / "support" / "checkpoint_job.py"
    command = [sys.executable, str(script), "--kills", str(kills), "--seconds", "0.3", "--out", str(tmp_path / "out")]
    command += ["--elastic"] * elastic
    ended = subprocess.run(command, env=compiled_quickly(os.environ), capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr[-2000:]
    record = json.loads((tmp_path / "out").read_text())["elastic" if elastic else "one_device"]
    assert record["kills"] == kills == record["restored_bit_for_bit"] + record["killed_before_it_had_restored"]
    assert record["restored_bit_for_bit"] >= 2 and record["steps_trained"] > 0


@pytest.mark.parametrize(
    ("call", "told"),
    {
        "restore(tx, m)": (lambda m, tx, s, p: jaxmp.checkpoint.restore(tx, m, params=p), r"restore\(manager, tx"),
        "restore(state)": (lambda m, tx, s, p: jaxmp.checkpoint.restore(m, s, params=p), "state as tx"),
        "restore(3)": (lambda m, tx, s, p: jaxmp.checkpoint.restore(3, tx, params=p), "must be a manager .* got int"),
        "restore(params=s)": (lambda m, tx, s, p: jaxmp.checkpoint.restore(m, tx, params=s), "state as params"),
        "partial=True": (
            lambda m, tx, s, p: jaxmp.checkpoint.restore(m, tx, params=p, partial=True),
            r'path patterns must be text.* got True. Name the paths; "\*" fits all',
        ),
        "layout=specs": (
            lambda m, tx, s, p: jaxmp.checkpoint.restore(m, tx, params=p, layout={"w": 3}),
            r"takes the layout that jaxmp.fsdp.layout_of\(params, mesh\) returns; got dict",
        ),
        "save(directory)": (
            lambda m, tx, s, p: jaxmp.checkpoint.save("dir", 1, params=p, opt_state=s),
            r"got str as manager, int as step. jaxmp.checkpoint.manager\(directory\) makes a manager",
        ),
        "save(step)": (lambda m, tx, s, p: jaxmp.checkpoint.save(m, "9", params=p, opt_state=s), "str as step"),
        "save(swapped)": (lambda m, tx, s, p: jaxmp.checkpoint.save(m, 9, params=s, opt_state=p), "state as params"),
        "save(swapped, of optax)": (
            lambda m, tx, s, p: jaxmp.checkpoint.save(m, 9, params=optax.adam(1.0).init(p), opt_state=p),
            "got an optimizer's state as params",
        ),
        "save(extra=[])": (
            lambda m, tx, s, p: jaxmp.checkpoint.save(m, 9, params=p, opt_state=s, extra=[p]),
            r"extra= takes trees by name.*; got list. Give each tree a name",
        ),
        "convert(p, s)": (
            lambda m, tx, s, p: jaxmp.checkpoint.convert(p, s, to=tx, policy="bf16"),
            r"convert\(opt_state, params, to=, policy=\); got an optimizer's state as params",
        ),
        "convert(to=policy)": (
            lambda m, tx, s, p: jaxmp.checkpoint.convert(s, p, to="bf16", policy=tx),
            r"got a policy \('bf16'\) as to, an optimizer as policy",
        ),
    }.values(),
    ids=lambda x: "" if callable(x) else x[:30],
)  # fmt: skip
def test_arguments_in_the_place_of_others_are_named(call, told, tmp_path):
    tx, params = jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), {"w": jnp.ones((2, 2), jnp.bfloat16)}
    with jaxmp.checkpoint.manager(tmp_path) as steps, pytest.raises(TypeError, match=told):
        call(steps, tx, tx.init(params), params)


def test_the_directory_of_a_manager_is_a_source(tmp_path):
    """Its newest complete step. A restore right behind a save waits for it."""
    tx, params = jaxmp.mixed_precision(optax.adam(1e-3), "bf16"), {"w": jnp.ones((2, 2), jnp.bfloat16)}
    with jaxmp.checkpoint.manager(tmp_path) as steps:
        for step in (2, 10):
            more = jax.tree.map(lambda x, step=step: x * step, params)
            checkpoint.save(steps, step, params=more, opt_state=tx.init(more), policy="bf16")
        assert checkpoint.restore(steps, tx, params=params).step == 10
    (tmp_path / "11.orbax-checkpoint-tmp").mkdir()
    found = checkpoint.restore(tmp_path, tx, params=params)
    assert (found.step, float(found.params["w"][0, 0])) == (10, 10.0)
    assert checkpoint.restore(tmp_path, tx, params=params, step=2).params["w"][0, 0] == 2
    assert jaxmp.checkpoint.read_metadata(tmp_path)["policy"].startswith("params=bfloat16")
