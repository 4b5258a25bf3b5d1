"""`python -m benchmarks gpu` without a GPU: a fault costs an item, a second run goes on, and results become tables.

The driver's tests run sections that use no jax: what they crash is a process of Python. Sections that compile run with
ALL=1.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from xml.etree import ElementTree

import pytest

from benchmarks.gpu import report, run as gpu, sections as gpu_sections_table
from benchmarks.gpu.sections import Section
from benchmarks.lib.record import Record
from benchmarks.lib.tables import ROOT, markers
from benchmarks.lib.timing import Bench, LeftOut, Variant

pytestmark = pytest.mark.xdist_group("benchmarks_gpu")
MACHINE = Section("gpu_sections:machine", "", 60.0, 60.0)


@pytest.fixture
def bench():
    return Bench(tiny=True, record=Record(None, "here"), seconds=1000.0)


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs the driver over sections of `gpu_sections`; returns its exit status and the records."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    monkeypatch.setenv("GPU_SECTIONS_FOLDER", str(tmp_path))
    monkeypatch.setattr(gpu, "source", lambda: "this code")
    monkeypatch.setattr(gpu, "GRACE", 3.0)

    def driven(*names, arguments=(), machine="machine", limit=60.0, item=30.0):
        table = {name: Section(f"gpu_sections:{name}", name, limit, item) for name in names}
        machine = MACHINE._replace(runs=f"gpu_sections:{machine}")
        status = gpu.main(["--out", str(tmp_path / "out"), *arguments], sections=table, machine=machine)
        folder = tmp_path / "out" / "a_fake_gpu"
        return status, {name: Record(folder / f"{name}.json", name) for name in names}

    return driven


def states(record):
    return [item["state"] for item in record.items.values()]


# --- the driver -------------------------------------------------------------------------------------------------------


def test_a_fault_costs_one_item_and_leaves_its_text(drive, tmp_path, capsys):
    """A crash, an error, a lost device and a missing package, with sound sections around them."""
    names = ("crashes", "needs_a_package", "fails", "loses_its_device", "runs_nothing", "sound")
    status, records = drive(*names)
    assert status == 1
    assert [records[name].state() for name in names] == ["failed", "missing", "failed", "failed", "failed", "passed"]
    assert states(records["crashes"]) == ["passed", "crashed", "passed"]
    text = records["crashes"].items["in it"]["text"]
    assert text.startswith("ended by SIGSEGV") and "gpu_sections.py" in text  # Python's own traceback of a fault
    assert states(records["fails"]) == ["passed", "failed", "passed"]
    assert "ZeroDivisionError" in records["fails"].items["in it"]["text"]
    assert states(records["loses_its_device"]) == ["passed", "failed", "passed"]
    assert records["needs_a_package"].data["missing"] == "a_package_that_wheels_bring"
    assert records["runs_nothing"].data["error"] == "the section ran nothing"
    # The summary says it all, in its file and on the screen; junit has every item.
    summary = (tmp_path / "out" / "a_fake_gpu" / "summary.md").read_text()
    assert summary in capsys.readouterr().out + "\n"
    assert "the package a_package_that_wheels_bring is missing: --wheels FOLDER brings it" in summary
    assert "* crashes, in it: crashed: ended by SIGSEGV" in summary
    suites = ElementTree.parse(tmp_path / "out" / "a_fake_gpu" / "junit.xml").getroot()
    found = {suite.get("name"): (suite.get("tests"), suite.get("failures")) for suite in suites}
    assert found["crashes"] == ("3", "1") and found["sound"] == ("2", "0")
    assert "ended by SIGSEGV" in suites.find(".//testcase[@name='in it']/failure").text


def test_a_section_that_hangs_is_ended_where_it_hangs(drive):
    """By the limit of an item, with the line it stood at; the next item runs."""
    status, records = drive("hangs", item=1.0)
    assert status == 1
    assert states(records["hangs"]) == ["passed", "hung", "passed"]
    text = records["hangs"].items["in it"]["text"]
    assert text.startswith("ended after its time limit") and "gpu_sections.py" in text


@pytest.mark.thorough(0)
def test_a_section_that_hangs_for_its_whole_time_is_killed(drive):
    """Its own limit is out of reach, as where a driver holds the process: the parent ends it."""
    status, records = drive("hangs", "sound", limit=1.0)
    assert status == 1
    assert states(records["hangs"]) == ["passed", "no time"] and records["hangs"].state() == "no time"
    assert records["hangs"].items["in it"]["text"].startswith("still running when the section's time was over")
    assert records["sound"].state() == "passed"


def test_a_section_that_is_killed_from_outside_loses_one_item(drive, tmp_path):
    def kill():
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            time.sleep(0.02)
        os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    status, records = drive("waits_to_be_killed")
    killer.join()
    assert status == 1
    assert states(records["waits_to_be_killed"]) == ["passed", "killed", "passed"]
    assert records["waits_to_be_killed"].items["in it"]["text"].startswith("ended by SIGKILL")


def test_a_second_run_goes_on_where_the_first_stopped(drive, tmp_path, monkeypatch, capsys):
    names = ("crashes_once", "sound")
    assert drive(*names)[0] == 1
    (tmp_path / "mended").touch()
    capsys.readouterr()
    status, records = drive(*names)
    assert status == 0
    assert states(records["crashes_once"]) == ["passed"] * 3
    assert "kept: it passed before" in capsys.readouterr().out
    assert (tmp_path / "sound").read_text() == "run\n"
    # Other code, or --again: nothing is kept.
    assert drive(*names, arguments=["--again"])[0] == 0
    monkeypatch.setattr(gpu, "source", lambda: "other code")
    assert drive(*names)[0] == 0
    assert (tmp_path / "sound").read_text() == "run\n" * 3


def test_a_driver_that_is_stopped_says_what_it_has(drive, tmp_path, capsys):
    def stop():
        while not (tmp_path / "pid").exists():
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGTERM)

    stopper = threading.Thread(target=stop)
    stopper.start()
    status, records = drive("sound", "waits_to_be_killed")
    stopper.join()
    assert status == 1
    assert records["sound"].state() == "passed"
    assert "stopped by SIGTERM: the same command goes on here" in capsys.readouterr().out
    time.sleep(0.1)
    with pytest.raises(ProcessLookupError):  # and leaves no process behind
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_what_there_is_no_time_for_is_not_started(drive, tmp_path, capsys):
    status, records = drive("sound", arguments=["--limit", "4"])
    assert status == 1
    assert records["sound"].state() == "" and not (tmp_path / "sound").exists()
    assert "not started: the time for the whole run was over" in capsys.readouterr().out


def test_packages_come_from_a_folder_of_wheels_without_pip_or_registry(drive, tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("PATH", "")
    (tmp_path / "wheels").mkdir()
    with zipfile.ZipFile(tmp_path / "wheels" / "a_package-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("a_package_that_wheels_bring.py", "VALUE = 3")
        wheel.writestr("json.py", "raise ImportError('what Python has goes first')")
    status, records = drive("needs_a_package", arguments=["--wheels", str(tmp_path / "wheels")])
    assert status == 0
    assert records["needs_a_package"].rows == [{"what": "has it", "value": 3}]


@pytest.mark.thorough(1)
@pytest.mark.parametrize(
    ("machine", "message"),
    [
        ("no_jax", "has no jax. Name the interpreter that has jax for CUDA: make gpu PYTHON=/path/to/python3"),
        ("only_a_cpu", "this needs an NVIDIA GPU; jax found cpu. To run on a CPU, use --tiny."),
        ("lost_gpu", "ZeroDivisionError"),
    ],
)
def test_a_machine_that_cannot_measure_is_named(drive, machine, message, capsys):
    status, _ = drive("sound", machine=machine)
    assert status == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tiny", "--out", str(gpu.FOLDER)], "--tiny does not measure a GPU: set another folder for its results"),
        (["--sections", "copies"], "sections are correctness, copy, casts"),
        (["--wheels", "/nonexistent"], "no wheels in /nonexistent; benchmarks/gpu/pack.sh /nonexistent makes them"),
    ],
)
def test_wrong_arguments_are_named(arguments, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        gpu.main(arguments)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_the_driver_needs_python_alone():
    """Where jax faults, the driver still works: it imports no package."""
    code = "import sys; sys.path.insert(0, '.'); import benchmarks.gpu.run, benchmarks.gpu.worker, benchmarks.__main__;"
    code += "print(sorted({'jax', 'numpy', 'flax', 'optax', 'tyro', 'jaxmp'} & set(sys.modules)))"
    found = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.stdout == "[]\n", found.stderr


def test_every_section_exists_and_the_limits_leave_time_for_what_comes_first():
    for section in gpu_sections_table.SECTIONS.values():
        module, _, function = section.runs.partition(":")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {function}(bench: Bench) -> None:" in text
        assert section.item <= section.limit
    first = list(gpu_sections_table.SECTIONS)[:5]
    assert sum(gpu_sections_table.SECTIONS[name].limit for name in first) < gpu_sections_table.WHOLE == 480.0


# --- items ------------------------------------------------------------------------------------------------------------


def test_a_variant_that_fails_leaves_the_others(bench):
    def broken():
        raise RuntimeError("no such kernel\nand more")

    def missing():
        raise LeftOut("torch is missing")

    sound = lambda: Variant(lambda: 1.0)  # noqa: E731
    bench.compare("it", {"broken": broken, "missing": missing, "sound": sound})
    assert [row["variant"] for row in bench.record.rows] == ["sound"]
    found = {name: item["state"] for name, item in bench.record.items.items()}
    assert found == {"it, broken": "failed", "it, missing": "left out", "it, sound": "passed", "it": "passed"}
    assert "in broken" in bench.record.items["it, broken"]["text"]
    # The same program again, after a fault: what ran is not run again. A second run measures all of it.
    bench.compare("it", {"broken": broken, "missing": missing, "sound": broken})
    assert len(bench.record.rows) == 1
    bench.record.forget_what_is_to_run_again()
    assert bench.record.rows == []
    bench.compare("it", {"broken": sound, "missing": sound, "sound": sound})
    assert len(bench.record.rows) == 3 and states(bench.record) == ["passed"] * 4


def test_what_a_section_has_no_time_for_is_left_to_a_second_run(bench):
    bench.ends = time.monotonic() - 1
    bench.compare("it", {"late": lambda: 1 / 0})
    bench.check("that", lambda: 1 / 0)
    assert states(bench.record) == ["no time", "no time"]
    bench.record.data["ended"] = True
    assert bench.record.state() == "no time"
    bench.record.forget_what_is_to_run_again()
    assert bench.record.items == {}


def test_a_record_is_whole_after_every_item(tmp_path):
    path = tmp_path / "here.json"
    record = Record(path, "here")
    record.begin("one")
    assert json.loads(path.read_text())["current"] == "one"
    record.end("one")
    record.end("beside", "left out", "why")
    assert Record(path).items.keys() == {"one", "beside"} and Record(path).data["current"] is None
    assert [file.name for file in tmp_path.iterdir()] == ["here.json"]


# --- the report -------------------------------------------------------------------------------------------------------


def row(what, variant, **fields):
    return {"what": what, "variant": variant, "host_us": 1.0, **fields}


def stored(folder, **sections):
    """Files of sections, as a run on a GPU leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in sections.items():
        record = Record(folder / f"{name}.json", name)
        record.data |= {"rows": rows, "ended": True, "tiny": False, "device": "GPU X", "versions": {"jax": "9"}}
        for one in rows:
            record.end(f"{one['what']}, {one['variant']}")
    return report.stored(folder)


DENSE = "Dense 8192x4096x4096, forward and backward"
LAYER = "training step of a Llama layer, width 4096"
STACKED = "training step of stacked layers"


def test_targets_are_held_missed_or_not_measured(tmp_path):
    bus = [row("copy over the bus", way, us=1.0, bus_bytes_per_s=50e9) for way in ("in", "out")]
    steps = [row(STACKED, "device", us=1e6), row(STACKED, "host", us=1.5e6, bus_bytes=50e9)]
    records = stored(
        tmp_path,
        copy=[row("copy", "memcpy", us=1.0, bytes_per_s=4e12), row("copy", "kernel", us=1.0, bytes_per_s=3e12)],
        casts=[row("cast_transpose_amax, 8192x8192 bfloat16", "mosaic", us=1.0, bytes_per_s=3.6e12)],
        dense=[row(DENSE, "bf16", us=160.0), row(DENSE, "fp8", us=100.0)],
        llama=[row(LAYER, "bf16", us=110.0, peak_mib=10.0), row(LAYER, "fp8", us=100.0, peak_mib=10.0)],
        offload=[*bus, *steps],
    )
    found = {(t["what"], t["wanted"]): t for t in report.targets(records)}
    got = found["cast_transpose_amax, 8192x8192 bfloat16", "0.85 of the copy bandwidth"]
    assert got["got"] == pytest.approx(0.9) and got["holds"] is True
    assert found[DENSE, "1.5 times as fast as bf16"]["got"] == pytest.approx(1.6)
    assert found[LAYER, "1.35 times as fast as bf16"]["holds"] is False
    assert found[LAYER, "1 no more memory than bf16"]["holds"] is True
    # 50 GB over the bus take a second alone; the step became half a second longer.
    assert found[STACKED, "0.5 of the copies hidden"]["got"] == pytest.approx(0.5)
    # A kernel that gave no time is a miss; torch that is not there is none.
    what = "gradient_norm, float16"
    (record,) = stored(tmp_path / "tree", tree=[row(what, "mosaic", us=1.0)])
    record.end(f"{what}, torch", "left out", "torch is missing")
    holds = {(t["what"], t["wanted"]): t["holds"] for t in report.targets([record])}
    assert holds[what, "1 times as fast as torch"] is None
    assert holds["unscale_and_check, float32", "0.85 of the copy bandwidth"] is False


def test_tables_are_written_from_files_and_only_where_something_was_measured(tmp_path, capsys):
    begin, end = markers("gpu")
    pages = {name: tmp_path / name for name in ("page", "front")}
    for page in pages.values():
        page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert report.write(tmp_path / "results", **pages) == 0
    assert "nothing to write" in capsys.readouterr().out
    assert pages["page"].read_text() == f"before\n{begin}\n{report.NOT_YET}\n{end}\nafter\n"
    assert pages["front"].read_text() == f"before\n{begin}\n\n{end}\nafter\n"
    rows = [row(DENSE, "bf16", us=160.0, flops_per_s=7e14), row(DENSE, "fp8", us=100.0, flops_per_s=11e14)]
    stored(tmp_path / "results" / "gpu_x", dense=rows)
    (tmp_path / "results" / "gpu_x" / "summary.md").write_text("")
    assert report.write(tmp_path / "results", **pages) == 0
    long, short = (pages[name].read_text() for name in ("page", "front"))
    assert "| dense " in long and "700.0" in long and "| TFLOP/s |" in long and "GPU X; jax 9." in long
    assert "GB/s" not in long and "peak MiB" not in long  # no column without numbers
    assert "| 1.5 times as fast as bf16 | 1.60" in long
    assert "| on GPU X " in short and "1.60" in short and LAYER not in short + long
    # Toy sizes measure nothing.
    (record,) = report.stored(tmp_path / "results" / "gpu_x")
    record.data["tiny"] = True
    record.save()
    report.write(tmp_path / "results", **pages)
    assert report.NOT_YET in pages["page"].read_text()


def test_the_stored_results_are_the_tables_of_the_pages():
    """Both pages have their markers, and hold what `--report` would write."""
    begin, end = markers("gpu")
    for page in (report.README, report.FRONT):
        assert page.read_text().count(begin) == page.read_text().count(end) == 1
    if not list(gpu.FOLDER.glob("*/*.json")):
        assert f"{begin}\n{report.NOT_YET}\n{end}" in report.README.read_text()


@pytest.mark.parametrize(
    ("fp8_us", "width"), [((9, 9, 9), 512), ((11, 9, 9), 1024), ((9, 11, 9), 2048), ((9, 9, 11), None)]
)
def test_fp8_pays_from_the_width_behind_which_it_always_does(fp8_us, width):
    rows = []
    for w, us in zip((512, 1024, 2048), fp8_us, strict=True):
        what = f"training step of a Llama layer, width {w}"
        rows += [row(what, "bf16", us=10), row(what, "fp8", us=us, params=w * w)]
    found = report.pays_from(rows)
    assert found["width"] == width
    if width:
        assert (found["layers"], found["params"]) == (width // 128, width // 128 * width**2)


def test_every_target_is_of_a_row_that_a_section_makes():
    """By name: a target of a row that no section makes would always be missed."""
    from benchmarks.gpu import kernels, launches, offload, optimizer, soundness

    updates = {f"multi_tensor_update AdamW, {kind}" for kind in kernels.KINDS}
    skipped = {soundness.SKIPPED.format(name) for name in launches.UPDATES}
    asked = {target.what for target in report.all_targets()}
    assert {what for what in asked if what.startswith("multi_tensor_update AdamW, float3")} <= updates | skipped
    assert {target.what for target in report.all_targets() if target.section == "skipped"} <= skipped
    assert {offload.UPDATE, offload.STEP} <= asked
    assert {target.section for target in report.all_targets()} <= set(gpu_sections_table.SECTIONS)
    programs = {p.name for p in optimizer.on_one_device()}
    of = {v for t in report.all_targets() if t.section == "optimizer" for v, _ in filter(None, (t.of, t.by))}
    assert of <= programs


# --- sections that compile --------------------------------------------------------------------------------------------


@pytest.mark.thorough(0)
def test_the_copy_is_timed_in_a_process_of_its_own(tmp_path):
    """The real sections with jax: the machine and the copy, in tiny sizes."""
    assert gpu.main(["--tiny", "--out", str(tmp_path), "--sections", "copy"]) == 0
    record = Record(tmp_path / "cpu" / "copy.json")
    assert {"python", "jax", "flax", "optax"} <= record.data["versions"].keys() and record.data["tiny"]
    assert [row["variant"] for row in record.rows] == ["memcpy", "kernel"]
    for found in record.rows:
        assert 0 < found["low_us"] <= found["us"] <= found["high_us"] and found["bytes_per_s"] > 0


def test_the_example_is_built_as_the_example_builds_it(monkeypatch):
    """Its functions are the example's own, and change with it: traced, not compiled."""
    import jax

    from benchmarks.gpu import models

    def traced(policy, recipe, model, loss_fn, example, batch, **kwargs):
        params = jax.eval_shape(lambda: model.init(jax.random.key(0), example)["params"])
        return policy.compute_dtype, recipe, jax.eval_shape(loss_fn, params, batch).shape, kwargs["tokens"]

    monkeypatch.setattr(models, "train_step", traced)
    size = {"width": 32, "layers": 1, "heads": 2}
    assert models._example_step(size, (1, 17), policy_name="bf16") == (jax.numpy.bfloat16, None, (), 16)


@pytest.mark.thorough(0)
def test_all_sections_end_well_in_tiny_sizes(tmp_path):
    """`make gpu ARGS=--tiny`, whole: minutes."""
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"ARGS=--tiny --out {tmp_path}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    for name in gpu_sections_table.SECTIONS:
        record = Record(tmp_path / "cpu" / f"{name}.json")
        assert record.state() == "passed", report.wrong(record)
