"""`python -m jaxmp`: what serves what, read off real and pretended devices."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp import __main__ as command
from jaxmp._src.fp8 import backends
from jaxmp._src.step import next_steps
from pallas_kernels import backend as kernel_backend

FUSED = "fused optimizer update"
FP8, MXFP8, BLOCKS = "fp8 matmul", "block-scaled matmul, MXFP8", "block-scaled matmul, BlockScaling"


@pytest.fixture
def machine(monkeypatch):
    """A function that puts GPUs of one compute capability into this machine."""

    def install(capability, n=1):
        gpus = [SimpleNamespace(device_kind="NVIDIA GPU", compute_capability=capability)] * n
        monkeypatch.setattr(jax, "devices", lambda platform=None: gpus)
        monkeypatch.setattr(jax, "device_count", lambda: n)
        monkeypatch.setattr(kernel_backend, "FIRST_JAX", (0, 0, 0))  # whatever this jax is

    return install


def served():
    return {row.operation: row for row in backends.backends()}


def test_it_prints_versions_devices_and_every_operation(capsys):
    assert command.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert f"jaxmp {jaxmp.__version__}: python " in out
    assert f"jax {jax.__version__}, jaxlib " in out
    assert "8 x cpu\n" in out
    for row in backends.backends():
        assert any(line.split() == " ".join(row).split() for line in out.splitlines())


def test_alone_it_prints_a_short_help(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jaxmp") and len(out.splitlines()) <= 12
    assert "    doctor " in out and "--version" in out


@pytest.mark.parametrize(
    ("capability", "policy"), [("7.5", '"fp16"'), ("8.0", '"bf16"'), ("9.0", 'try "fp8"'), ("10.0", "NVFP4()")]
)
def test_doctor_says_which_policy_to_begin_with(machine, capability, policy):
    machine(capability)
    (step,) = next_steps.next_steps()
    assert policy in step


def test_doctor_says_that_jax_does_not_see_the_gpu(monkeypatch, capsys):
    monkeypatch.setattr(next_steps.shutil, "which", lambda name: None)
    assert len(next_steps.next_steps()) == 1
    monkeypatch.setattr(next_steps.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert command.main(["doctor"]) == 0
    assert "\n- An NVIDIA driver is installed, but jax has no GPU." in capsys.readouterr().out


def test_an_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit, match="^2$"):
        command.main(["formats"])
    assert "'formats'" in capsys.readouterr().err


def test_without_a_gpu_xla_serves_and_matmuls_are_emulated():
    rows = served()
    assert rows[FUSED].backend == "xla"
    assert rows[FUSED].reason == kernel_backend.why_no_kernels(needs_gpu=True)
    for operation in (FP8, MXFP8, BLOCKS):
        assert rows[operation].backend == "emulated"
        assert rows[operation].reason.endswith("in float32")
    assert rows[FP8].reason.startswith("there is no NVIDIA GPU")


@pytest.mark.parametrize(
    ("capability", "fused", "fp8", "mxfp8"),
    [
        ("8.0", "xla", "emulated", "emulated"),
        ("8.9", "xla", "cublasLt fp8", "emulated"),
        ("9.0", "mosaic", "cublasLt fp8", "emulated"),
        ("10.0", "mosaic", "cublasLt fp8", "cudnn mxfp8"),
    ],
    ids=["Ampere", "Ada", "Hopper", "Blackwell"],
)
def test_each_generation_gets_what_it_can_run(machine, capability, fused, fp8, mxfp8):
    machine(capability)
    rows = served()
    assert (rows[FUSED].backend, rows[FP8].backend, rows[MXFP8].backend) == (fused, fp8, mxfp8)
    assert rows[BLOCKS].backend == "emulated"
    for operation in (FUSED, FP8, MXFP8):
        if rows[operation].backend in ("xla", "emulated"):
            assert f"a GPU here has {float(capability)}" in rows[operation].reason
    exact = "float32" if fp8 == "emulated" else "bfloat16"
    assert rows[BLOCKS].reason.endswith(f"in {exact}")


def test_the_oldest_gpu_counts(machine, monkeypatch):
    machine("9.0")
    gpus = [SimpleNamespace(compute_capability=capability) for capability in ("9.0", "8.0")]
    monkeypatch.setattr(jax, "devices", lambda platform=None: gpus)
    assert "a GPU here has 8.0" in served()[FUSED].reason


def test_several_gpus_get_kernels_but_on_some_meshes(machine, capsys):
    machine("9.0", n=8)
    row = served()[FUSED]
    assert row.backend == "mosaic"
    assert row.reason == (
        "with jaxmp.fused_*, in apply_gradients; split params in shard_map(check_vma=False); xla outside of shard_map"
    )
    assert command.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "8 x NVIDIA GPU, compute capability 9.0\n" in out and "mosaic" in out


@pytest.mark.parametrize(
    ("manual", "kind", "reason"),
    [
        ((), AxisType.Auto, None),
        ((), AxisType.Explicit, "an array is on a mesh with explicit axes"),
        (("a", "b"), AxisType.Auto, None),
        (("a",), AxisType.Auto, "only the axes ('a',) of the mesh ('a', 'b') are manual here"),
    ],
    ids=["jit", "explicit", "shard_map", "of some axes"],
)
def test_the_meshes_that_are_named_are_those_on_which_xla_serves(manual, kind, reason):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(kind,) * 2)
    reasons = []

    def ask(x):
        reasons.append(kernel_backend.why_not_here(x))
        return x

    if manual:
        ask_here = jax.shard_map(ask, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names=set(manual))
    else:
        ask_here = ask
    jax.jit(ask_here).trace(jax.device_put(np.zeros(8), NamedSharding(mesh, P("a"))))
    assert reasons == [reason]


def test_an_old_jax_is_the_reason(machine, monkeypatch):
    machine("9.0")
    monkeypatch.setattr(kernel_backend, "FIRST_JAX", (99, 0, 0))
    assert served()[FUSED].reason == f"kernels need jax >= 99.0.0; this is {jax.__version__}"


@pytest.mark.thorough(0)
def test_version_of_the_command():
    run = subprocess.run([sys.executable, "-m", "jaxmp", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout == f"jaxmp {jaxmp.__version__}\n"
