"""The examples as a user starts them, but small: in this process, and where several processes train, in their own."""

import json
import math
import os
import pydoc_data.topics
import re
import runpy
import signal
import socket
import subprocess
import sys
import types

import jax
import pytest

import train
from helpers import ROOT, compiled_quickly

TINY = "--width 32 --heads 2 --layers 1 --batch-size 16 --seq-len 32".split()
HANGS_AFTER = 300  # seconds; each takes about ten


def arguments_of(script, *args):
    return [str(part) for part in (ROOT / "examples" / script, *args)]


@pytest.fixture
def run(monkeypatch, capsys):
    """`run(script, *args)`: runs an example here, and returns what it printed."""
    monkeypatch.setenv("COLUMNS", "150")

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", arguments_of(script, *args))
        runpy.run_path(sys.argv[0], run_name="__main__")
        out, err = capsys.readouterr()
        assert "Warning" not in err
        return out

    return run


@pytest.fixture
def short_text(monkeypatch):
    """A few pages of the text, so that held-out losses take little time. Processes of their own read all of it."""
    topics = dict(list(pydoc_data.topics.topics.items())[:20])
    monkeypatch.setattr(pydoc_data.topics, "topics", topics)
    monkeypatch.setattr(train, "topics", topics)


@pytest.fixture
def two_devices(monkeypatch):
    """The first two of the devices, so that each step takes less time."""
    for name in ("device_count", "local_device_count"):
        monkeypatch.setattr(jax, name, lambda: 2)


@pytest.fixture
def start():
    """`start(script, *args)`: the running example, on `devices` of its own; none outlives the test."""
    running = []

    def start(script, *args, devices):
        environment = compiled_quickly(os.environ | {"PYTHONPATH": str(ROOT), "COLUMNS": "150"})
        flags = [f for f in environment["XLA_FLAGS"].split() if "host_platform_device_count" not in f]
        environment["XLA_FLAGS"] = " ".join(flags)
        command = [sys.executable, *arguments_of(script, *args, "--cpu-devices", devices)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        running.append(subprocess.Popen(command, env=environment, text=True, **pipes))
        return running[-1]

    yield start
    for process in running:
        process.kill()
        process.communicate()


def finish(process):
    """What it printed. Warnings count as failures, as they do in all tests here."""
    out, err = process.communicate(timeout=HANGS_AFTER)
    assert process.returncode == 0, err[-3000:]
    assert "Warning" not in err, err[-3000:]
    return out


def is_png(path):
    return path.read_bytes().startswith(b"\x89PNG")


def test_train(run, short_text, two_devices, tmp_path):
    knobs = (
        *"--policies fp16 --steps 12 --initial-scale 1024 --overflow-steps 5 6".split(),
        *"--growth-interval 4 --log-every 4 --eval-every 12".split(),
    )
    files = ("--out", tmp_path, "--figure", tmp_path / "figure.png", "--json", tmp_path / "train.json")
    out = run("train.py", *TINY, *knobs, *files)
    assert is_png(tmp_path / "train.png") and is_png(tmp_path / "figure.png")
    (row,) = json.loads((tmp_path / "train.json").read_text())["runs"]
    assert all(math.isfinite(x) for x in row.values() if isinstance(x, int | float)), row
    assert 2 < row["held_out_loss"] < math.log(256)  # better than a guess
    assert re.search(rf"fp16 +{row['train_loss']:.4f} +{row['held_out_loss']:.4f} ", out)
    assert row["skipped_steps"] == [5, 6]
    assert row["events"] == [
        "step 3: loss scale 1024 -> 2048",
        "step 5: a device overflowed, all skip; loss scale stays 2048 (hysteresis)",
        "step 6: a device overflowed, all skip; loss scale 2048 -> 1024",
        "step 10: loss scale 1024 -> 2048",
    ]
    assert all(event in out for event in row["events"])
    (line,) = re.findall(r"fp16 matmul FLOPs: (.*)", out)
    assert re.fullmatch(r"[\d.]+% in float16, [\d.]+% in float32; float32: .*logits \(autocast is off\)", line)
    # 2 bytes a param, and a master and two moments of 4 each; norms stay in float32, without a master.
    norms = 3 * 32
    count = (row["param_bytes"] - 2 * norms) // 2
    assert 0 <= row["optimizer_state_bytes"] - 4 * (3 * count - norms) < 100  # the rest is counts and the loss scale


@pytest.mark.thorough(0)
def test_train_in_fp8(run, short_text, tmp_path):
    knobs = "--policies fp8 bf16+8bit --steps 12 --log-every 4 --eval-every 12".split()
    out = run("train.py", *TINY, *knobs, "--out", tmp_path, "--json", tmp_path / "train.json")
    for row in json.loads((tmp_path / "train.json").read_text())["runs"]:
        assert 2 < row["held_out_loss"] < math.log(256) and row["skipped_steps"] == []
    (line,) = re.findall(r"fp8 matmul FLOPs: (.*)", out)
    assert "% in float8_e4m3fn" in line and "% in bfloat16" in line


@pytest.mark.thorough(0)  # tests/devices/test_processes.py holds the library to it
def test_train_is_the_same_in_two_processes(start, run, tmp_path):
    knobs = (
        *TINY,
        *"--policies fp16 --steps 5 --initial-scale 1024 --overflow-steps 3 4 --log-every 2 --eval-every 5".split(),
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{probe.getsockname()[1]}"
    together = ("--coordinator", coordinator, "--num-processes", 2, "--process-id")
    workers = [
        start("train.py", *knobs, "--out", tmp_path, "--json", tmp_path / f"{i}.json", *together, i, devices=4)
        for i in range(2)
    ]
    alone = run("train.py", *knobs, "--out", tmp_path, "--json", tmp_path / "alone.json")  # on 8 devices too
    outs = [finish(worker) for worker in workers]
    assert "step 4: a device overflowed, all skip; loss scale 1024 -> 512" in outs[0]
    assert "loss scale" not in outs[1]  # only the first process prints
    assert not (tmp_path / "1.json").exists()
    (joined,), (expected,) = (json.loads((tmp_path / f"{name}.json").read_text())["runs"] for name in ("0", "alone"))
    assert "step 4" in alone
    for name in ("skipped_steps", "events", "loss_scale", "param_bytes", "optimizer_state_bytes"):
        assert joined[name] == expected[name], name
    assert joined["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-4)


def test_train_says_which_batch_sizes_fit(run):
    with pytest.raises(SystemExit, match="--batch-size must be a multiple of the number of devices, 8; got 7"):
        run("train.py", "--batch-size", 7)


@pytest.mark.thorough(0)
def test_train_nnx(run, short_text, tmp_path):
    knobs = "--policies fp16+fp8 --steps 6 --log-every 2 --eval-every 6 --initial-scale 1e9".split()
    out = run("train_nnx.py", *TINY, *knobs, "--out", tmp_path)
    assert re.search(r"fp16\+fp8 +\d\.\d{4} +\d\.\d{4} ", out)
    assert "fp16+fp8 step 0: a device overflowed, all skip; loss scale stays 1000000000 (hysteresis)" in out
    assert "fp16+fp8 step 1: a device overflowed, all skip; loss scale 1000000000 -> 500000000" in out
    assert is_png(tmp_path / "train_nnx.png")


@pytest.mark.thorough(0)
def test_two_losses(run):
    out = run("two_losses.py")
    assert "step  60: skipped by B " in out
    assert "step 120: skipped by A and B " in out
    losses = re.search(r"regression loss (\S+) -> (\S+), classification loss (\S+) -> (\S+)", out)
    before_a, after_a, before_b, after_b = (float(x) for x in losses.groups())
    assert after_a < 0.1 * before_a
    assert after_b < 0.1 * before_b


@pytest.mark.thorough(0)
def test_gradient_penalty(run):
    out = run("gradient_penalty.py", "--steps", 60, "--log-every", 30)
    assert re.search(r"    0 +\d\.\d{4} +nan +65536   skipped\n", out)
    fp32, fp16, scale = re.search(r"   59 +(\S+) +(\S+) +(\d+)\n", out).groups()
    assert float(fp16) == pytest.approx(float(fp32), abs=0.3)  # behind by the steps that it skipped
    assert float(scale) < 65536
    distances = re.search(r"distance 3: the critic finds (\S+) in fp32 and (\S+) in fp16, which skipped [1-9]", out)
    assert all(2 < float(x) < 4 for x in distances.groups())


@pytest.mark.thorough(0)
def test_moe(run):
    out = run("moe.py", "--seeds", 2, "--steps", 60, "--batch-size", 128)
    rows = re.findall(r"(bf16|fp8) +(\d\.\d{4}) +(\d+\.\d)%", out)
    assert [name for name, *_ in rows] == ["bf16", "fp8"]
    losses = {name: float(loss) for name, loss, _ in rows}
    assert max(losses.values()) < 2.2  # a guess among ten classes: 2.30
    assert losses["fp8"] == pytest.approx(losses["bf16"], rel=0.1)
    assert all(0 < float(dropped) < 50 for *_, dropped in rows)
    assert re.search(r"fp8 .* [+-]\d+\.\d\d ± \d+\.\d\d %\n", out)


@pytest.mark.thorough(0)
def test_port_torch_amp(run):
    out = run("port_torch_amp.py", "--steps", 24, "--width", 8)
    rows = {}
    for name, *numbers in re.findall(r"(fp32|GradScaler|native) +(\S+) +(\S+) +(\S+)% +(\d+) +(\d+) +(\d+) kB", out):
        rows[name] = [float(x) for x in numbers]
    held_out, accuracy, skips, scale, size = ({name: row[i] for name, row in rows.items()} for i in range(1, 6))
    assert min(accuracy.values()) > 50 and max(held_out.values()) < 1.8  # a guess: 10% and 2.3
    assert skips["fp32"] == 0 < skips["GradScaler"] == skips["native"]
    assert scale == {"fp32": 1, "GradScaler": 2 ** (19 - skips["native"]), "native": 2 ** (19 - skips["native"])}
    assert size["fp32"] == size["GradScaler"] > 1.5 * size["native"]
    assert held_out["native"] == pytest.approx(held_out["GradScaler"], rel=0.05)  # masters, or float32 params
    events = re.findall(r"(GradScaler|native) (step .*)", out)
    assert [e for name, e in events if name == "native"] == [e for name, e in events if name == "GradScaler"]
    assert "GradScaler step 0: skipped, loss scale 524288 -> 262144" in out


@pytest.mark.thorough(0)
def test_port_torch_amp_in_nnx(run):
    out = run("port_torch_amp.py", "--framework", "nnx", "--loops", "native", "--steps", 6, "--width", 4)
    assert re.search(r"native( +\d\.\d{4}){2} ", out)


def test_a_script_completes_its_options(run, capsys):
    """In bash: by its own name, which needs the first line and the mode of the file."""
    script = ROOT / "examples" / "two_losses.py"
    assert os.access(script, os.X_OK) and script.read_text().startswith("#!/usr/bin/env python\n")
    with pytest.raises(SystemExit) as stopped:
        run("two_losses.py", "--tyro-print-completion", "bash")
    assert not stopped.value.code
    completion = capsys.readouterr().out
    name = re.search(r"complete -F (\w+)", completion)[1]
    ask = f'COMP_WORDS=({script.name} --st); COMP_CWORD=1; {name}; echo "${{COMPREPLY[@]}}"'
    reply = subprocess.run(["bash", "-c", f"{completion}\n{ask}"], capture_output=True, text=True, check=True)
    assert reply.stdout.split() == ["--steps"]


@pytest.fixture
def tensorboard(monkeypatch):
    """A stand-in for tensorboardX: what was written, as {name: {step: value}}; at `stop_at` it sends SIGTERM."""
    written, before = types.SimpleNamespace(scalars={}, stop_at=None), signal.getsignal(signal.SIGTERM)

    class SummaryWriter:
        def __init__(self, folder):
            written.folder = folder

        def add_scalar(self, name, value, step):
            written.scalars.setdefault(name, {})[step] = value
            if step == written.stop_at:
                written.stop_at = None
                os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=SummaryWriter))
    monkeypatch.setattr(jax, "device_count", lambda: 1)  # a program for one device compiles in half the time
    yield written
    signal.signal(signal.SIGTERM, before)


LOOP = "--policy fp16 --steps 8 --batch-size 8 --seq-len 8 --width 16 --layers 1 --log-every 2 --eval-every 8".split()


@pytest.mark.thorough(0)
def test_loop_stops_at_sigterm_and_goes_on_with_the_same_bits(run, short_text, tensorboard, tmp_path):
    knobs = (*LOOP, "--peak-tflops", 0.001, "--tensorboard", "--out")
    run("loop.py", *knobs, tmp_path / "whole")
    whole, tensorboard.scalars, tensorboard.stop_at = tensorboard.scalars, {}, 4
    assert "SIGTERM after step 4: saved; the same command goes on here" in run("loop.py", *knobs, tmp_path / "cut")
    assert list(tensorboard.scalars["loss"]) == [2, 4]
    out = run("loop.py", *knobs, tmp_path / "cut")
    assert re.search(r"step 8: held-out loss \d\.\d{4}\n", out) and "skipped" in out and "tokens/s" in out
    scalars = tensorboard.scalars
    assert list(scalars["loss"]) == [2, 4, 6, 8] and list(scalars["held_out_loss"]) == [8]
    assert all(scalars[name] == whole[name] for name in ("loss", "grad_norm", "held_out_loss"))
    assert all(math.isfinite(x) for column in scalars.values() for x in column.values())
    assert all(0.01 < x < 100 for x in scalars["grad_norm"].values())  # unscaled: the scale is 65536
    assert all(x > 0 for name in ("tokens_per_second", "mfu") for x in scalars[name].values())
