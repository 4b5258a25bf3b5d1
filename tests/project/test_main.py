"""`python -m jaxmp`: what serves what, read off real and pretended devices."""

import re
import subprocess
import sys
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxmp
from jaxmp import __main__ as command
from jaxmp._src.base import next_steps
from jaxmp._src.fp8 import backends, recipe_guide
from jaxmp._src.numerics import formats
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


@pytest.mark.parametrize("arguments", [["doctor"], ["backends"]], ids=["doctor", "backends"])
def test_it_prints_versions_devices_and_every_operation(arguments, capsys):
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert f"jaxmp {jaxmp.__version__}: python " in out
    assert f"jax {jax.__version__}, jaxlib " in out
    assert "8 x cpu\n" in out
    for row in backends.backends():
        assert any(line.split() == " ".join(row).split() for line in out.splitlines())


def test_alone_it_prints_a_short_help(capsys):
    assert command.main([]) == 0
    out = capsys.readouterr().out
    assert out.startswith("usage: python -m jaxmp") and len(out.splitlines()) <= 20
    assert all(f"    {name} " in out for name in ("doctor", "formats", "memory", "checkpoint", "replay"))


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


@pytest.mark.thorough(0)
def test_it_is_a_command():
    run = subprocess.run([sys.executable, "-m", "jaxmp", "formats"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("format")


def test_an_unknown_command_is_named(capsys):
    with pytest.raises(SystemExit):
        command.main(["backend"])
    assert "'backend'" in capsys.readouterr().err


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


def test_several_gpus_get_kernels_but_on_some_meshes(machine):
    machine("9.0", n=8)
    row = served()[FUSED]
    assert row.backend == "mosaic"
    assert row.reason == (
        "with jaxmp.fused_*, in apply_gradients; split params in shard_map(check_vma=False); "
        "xla where only some mesh axes are manual, or any is explicit"
    )


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


def test_devices_are_counted_with_their_capability(machine, capsys):
    machine("9.0", n=8)
    assert command.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "8 x NVIDIA GPU, compute capability 9.0\n" in out
    assert "mosaic" in out


def test_version(capsys):
    with pytest.raises(SystemExit, match="^0$"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"jaxmp {jaxmp.__version__}\n"


@pytest.mark.parametrize("name", ["checkpoint", "replay"])
@pytest.mark.parametrize("what", ["missing", "empty", "file", "file/below", "other", "numbers", ""])
def test_a_wrong_path_is_a_usage_error(name, what, tmp_path, capsys):
    """Status 1 is for what is there and damaged."""
    for folder in ("empty", "other", "numbers/7"):
        (tmp_path / folder).mkdir(parents=True)
    for file in ("file", "other/notes.txt", "numbers/7/notes.txt"):
        (tmp_path / file).write_text("no checkpoint")
    with pytest.raises(SystemExit, match="^2$"):
        command.main([name, what and str(tmp_path / what)])
    assert f"python -m jaxmp {name}: error: " in capsys.readouterr().err


# memory


def test_memory_prints_the_bytes_of_so_many_params(capsys):
    assert command.main(["memory", "1.048576e6"]) == 0
    out = capsys.readouterr().out
    table, told = out.split("\n\n")
    assert table == jaxmp.memory.table(jaxmp.memory.overview(2**20))
    assert told.startswith("Without activations, which depend on the model and the batch")
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert lines["bytes a parameter"][3:6] == ["16.00", "16.00", "16.00"]
    assert lines["P"][1:3] == ["1.05", "M"]


@pytest.mark.thorough(3)
@pytest.mark.parametrize(
    ("written", "number"),
    [("124M", 124e6), ("1.5e9", 1.5e9), ("1.5B", 1.5e9), ("7b", 7e9), ("350k", 350e3), ("1,500_000", 1.5e6)],
)
def test_memory_takes_a_number_as_people_write_it(written, number, capsys):
    assert command.main(["memory", written]) == 0
    assert capsys.readouterr().out.startswith(jaxmp.memory.table(jaxmp.memory.overview(number)))


@pytest.fixture
def planner(tmp_path, monkeypatch):
    """A module with plans."""
    (tmp_path / "my_plans.py").write_text(
        "import jax, jax.numpy as jnp, optax, jaxmp\n"
        "params = {'w': jax.ShapeDtypeStruct((1000, 1000), jnp.float32)}\n"
        "def one(): return jaxmp.memory.plan(params, 'fp32', optimizer=optax.sgd(0.1))\n"
        "def two(): return {'a': one(), 'b': one()}\n"
        "def none(): return params\n"
    )
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("what", "head"), [("one", ["one"]), ("two", ["a", "b"])])
def test_memory_prints_plans_of_a_user(planner, capsys, what, head):
    assert command.main(["memory", f"my_plans:{what}"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == head
    assert lines[1] == ["params", *["4.00", "MB"] * len(head)]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("many", "neither a number of parameters from 1 to 1e18 .124e6, 124M, 1.5B. nor module:function: 'many'"),
        ("M", "neither a number of parameters from 1 to 1e18"),
        ("5X", "neither a number of parameters from 1 to 1e18"),
        ("1e9B", "neither a number of parameters from 1 to 1e18"),
        ("", "neither a number of parameters from 1 to 1e18"),
        ("-1", "neither a number of parameters from 1 to 1e18"),
        ("0.5", "neither a number of parameters from 1 to 1e18"),
        ("nan", "neither a number of parameters from 1 to 1e18"),
        ("no_such_module:plan", "'no_such_module:plan' is not there: No module named 'no_such_module'"),
        ("my_plans:three", "'my_plans:three' is not there: module 'my_plans' has no attribute 'three'"),
        ("my_plans:none", "must return a plan of jaxmp.memory or a dict of them; got dict"),
        ("json:dumps", r"'json:dumps' must be a function without arguments that returns.*raised TypeError: dumps\(\)"),
    ],
)
def test_memory_names_what_is_wrong(planner, capsys, what, message):
    with pytest.raises(SystemExit, match="^2$"):
        command.main(["memory", what])
    assert re.search(message, capsys.readouterr().err)


# The numbers that the formats' own documents give
FORMATS = {
    "fp32": (32, 8, 23, 3.4028234663852886e38, 2.0**-126, 2.0**-149, 2.0**-23, 3.1415927410125732),
    "tf32": (32, 8, 10, 3.4011621342146535e38, 2.0**-126, 2.0**-136, 2.0**-10, 3.140625),
    "bf16": (16, 8, 7, 3.3895313892515355e38, 2.0**-126, 2.0**-133, 2.0**-7, 3.140625),
    "fp16": (16, 5, 10, 65504.0, 2.0**-14, 2.0**-24, 2.0**-10, 3.140625),
    "e4m3": (8, 4, 3, 448.0, 2.0**-6, 2.0**-9, 2.0**-3, 3.25),
    "e5m2": (8, 5, 2, 57344.0, 2.0**-14, 2.0**-16, 2.0**-2, 3.0),
    "e2m1": (4, 2, 1, 6.0, 1.0, 0.5, 0.5, 3.0),
}


def test_formats_are_those_of_their_documents():
    assert {f.name: tuple(f[1:]) for f in formats.formats()} == FORMATS


def test_formats_are_printed(capsys):
    assert command.main(["formats"]) == 0
    lines, guides, notes = (part.splitlines() for part in capsys.readouterr().out.split("\n\n"))
    assert len(lines) == 1 + len(FORMATS)
    assert lines[4].split() == ["fp16", "16", "5", "10", "65504", "6.1035e-05", "5.9605e-08", "0.00097656", "3.140625"]
    assert [line.split()[0] for line in guides] == [
        "recipe",
        *(guide.recipe for guide in recipe_guide.guides(jaxmp.fp8)),
    ]
    assert [line.partition(":")[0] for line in notes] == ["SQNR", "loss gap"] and all(
        name in guides[0] for name in ("SQNR [dB]", "loss gap [%]")
    )
