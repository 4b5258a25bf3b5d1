"""`python -m benchmarks gpu` without a GPU: a fault costs an item, a second run goes on, and results become tables."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest

from benchmarks.gpu import launches, models, offload, optimizer, report, run as gpu, sanitizer, sections, soundness
from benchmarks.gpu.sections import Section
from benchmarks.lib import roofline
from benchmarks.lib.record import Record, append, run_of, sources_of
from benchmarks.lib.tables import ROOT, markers
from benchmarks.lib.timing import Bench, LeftOut, OutOfTime, Variant
from benchmarks.programs import steps

MACHINE = Section("gpu_sections:machine", "", 60.0, 60.0)


@pytest.fixture
def bench():
    return Bench(tiny=True, record=Record(None, "here"), seconds=1000.0)


@pytest.fixture
def drive(tmp_path, monkeypatch):
    """Runs the driver over sections of `gpu_sections`, which use no jax; returns its exit status and the records."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "tests" / "support"))
    monkeypatch.setenv("GPU_SECTIONS_FOLDER", str(tmp_path))
    monkeypatch.setattr(gpu, "source", lambda: "this code")
    monkeypatch.setattr(gpu, "GRACE", 3.0)

    def driven(*names, arguments=(), machine="machine", limit=60.0, item=30.0):
        table = {name: Section(f"gpu_sections:{name}", name, limit, item) for name in names}
        machine = MACHINE._replace(runs=f"gpu_sections:{machine}")
        status = gpu.main(["--out", str(tmp_path / "out"), *arguments], sections=table, machine=machine)
        folder = tmp_path / "out" / "a_fake_gpu"
        return status, {name: Record(folder / report.FILE, name) for name in names}

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
    assert records["needs_a_package"].about["missing"] == "a_package_that_wheels_bring"
    assert records["runs_nothing"].about["error"] == "the section ran nothing"
    # The summary says it all, in its file and on the screen; junit has every item.
    summary = (tmp_path / "out" / "a_fake_gpu" / "summary.md").read_text()
    assert summary in capsys.readouterr().out + "\n"
    assert "the package a_package_that_wheels_bring is missing: --wheels FOLDER brings it" in summary
    assert "* crashes, in it: crashed: ended by SIGSEGV" in summary
    suites = ElementTree.parse(tmp_path / "out" / "a_fake_gpu" / "junit.xml").getroot()
    counts = {suite.get("name"): (suite.get("tests"), suite.get("failures")) for suite in suites}
    assert counts["crashes"] == ("3", "1") and counts["sound"] == ("2", "0")
    assert "ended by SIGSEGV" in suites.find(".//testcase[@name='in it']/failure").text


@pytest.mark.thorough(0)
def test_a_section_that_hangs_is_ended_where_it_hangs(drive):
    """By the limit of an item, with the line it stood at; the next item runs."""
    status, records = drive("hangs", item=1.0)
    assert status == 1
    assert states(records["hangs"]) == ["passed", "hung", "passed"]
    text = records["hangs"].items["in it"]["text"]
    assert text.startswith("ended after its time limit") and "gpu_sections.py" in text


@pytest.mark.thorough(0)
def test_a_build_beyond_the_limit_costs_its_own_row(drive, tmp_path):
    """What was measured before it is kept, and a second run begins with it."""
    status, records = drive("builds_for_too_long", limit=4.0)
    assert status == 1
    assert states(records["builds_for_too_long"]) == ["passed", "no time"]
    assert [row["variant"] for row in records["builds_for_too_long"].rows] == ["fast"]
    (tmp_path / "mended").touch()
    status, records = drive("builds_for_too_long")
    assert status == 0
    assert [row["variant"] for row in records["builds_for_too_long"].rows] == ["fast", "slow", "last"]
    assert (tmp_path / "built").read_text().split() == ["fast", "slow", "slow", "last"]


def test_compiled_programs_are_kept_for_a_second_run(monkeypatch):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    assert gpu.Runner(False, None).environment["JAX_COMPILATION_CACHE_DIR"] == str(ROOT / "build" / "compiled")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/of/this/machine")
    assert gpu.Runner(False, None).environment["JAX_COMPILATION_CACHE_DIR"] == "/of/this/machine"


def test_a_section_that_is_killed_from_outside_loses_one_item(drive, tmp_path):
    def kill():
        while not (tmp_path / "pid").exists():
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
    assert drive("crashes_once", "sound")[0] == 1
    (tmp_path / "mended").touch()
    capsys.readouterr()
    _, records = drive("crashes_once", "sound", "fails")
    assert states(records["crashes_once"]) == ["passed"] * 3
    printed = capsys.readouterr().out
    assert "kept: it passed before" in printed and (tmp_path / "sound").read_text() == "run\n"
    assert printed.index("fails  ") < printed.index("crashes_once  ")  # first what never ran
    # Other code, or --again: nothing is kept.
    assert drive("sound", arguments=["--again"])[0] == 0
    monkeypatch.setattr(gpu, "source", lambda: "other code")
    assert drive("sound")[0] == 0
    assert (tmp_path / "sound").read_text() == "run\n" * 3


def test_what_passed_with_other_code_is_kept_on_demand(drive, tmp_path, monkeypatch):
    assert drive("sound")[0] == 0
    (tmp_path / "mended").touch()
    monkeypatch.setattr(gpu, "source", lambda: "other code")
    monkeypatch.setattr(report, "SECTIONS", dict.fromkeys(("crashes_once", "sound")))
    assert drive("crashes_once", "sound", arguments=["--add"])[0] == 0
    assert (tmp_path / "sound").read_text() == "run\n"
    folder = tmp_path / "out" / "a_fake_gpu"
    assert sources_of(folder / report.FILE) == {"crashes_once": "other code", "sound": "this code"}
    assert "sound with `this code`; crashes_once with `other code`" in report.tables(folder)


@pytest.mark.thorough(0)
def test_a_section_that_starts_for_too_long_has_no_time_and_did_not_fail(drive):
    assert drive("starts_for_too_long", limit=1.0)[1]["starts_for_too_long"].state() == ""


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


def test_a_driver_that_is_stopped_before_it_measures_says_so(drive, monkeypatch, capsys):
    def stopped(*args):
        raise gpu.Stopped("SIGTERM")

    monkeypatch.setattr(gpu, "look", stopped)
    assert drive("sound")[0] == 2
    assert "stopped by SIGTERM before anything was measured" in capsys.readouterr().err


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
        (["--sections", "copies"], "sections are right, dense, gpt, llama"),
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
    run = subprocess.run([sys.executable, "-I", "-S", "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert run.stdout == "[]\n", run.stderr


def test_every_section_exists_and_the_limits_leave_time_for_what_comes_first():
    for section in sections.SECTIONS.values():
        module, _, function = section.runs.partition(":")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text()
        assert f"def {function}(bench: Bench) -> None:" in text
        assert section.item <= section.limit
    first = ["right", "dense", "gpt", "llama", "optimizer", "casts", "copy"]
    assert list(sections.SECTIONS)[:7] == first
    assert sum(sections.SECTIONS[name].limit for name in first) < sections.WHOLE == 480.0


# --- items ------------------------------------------------------------------------------------------------------------


def test_a_variant_that_fails_leaves_the_others(bench):
    def broken():
        raise RuntimeError("no such kernel\nand more")

    def missing():
        raise LeftOut("torch is missing")

    sound = lambda: Variant(lambda: 1.0)  # noqa: E731
    bench.compare("it", {"broken": broken, "missing": missing, "sound": sound})
    assert [row["variant"] for row in bench.record.rows] == ["sound"]
    items = {name: item["state"] for name, item in bench.record.items.items()}
    assert items == {"it, broken": "failed", "it, missing": "left out", "it, sound": "passed"}
    assert "in broken" in bench.record.items["it, broken"]["text"]
    # The same program again, after a fault: what ran is not run again.
    bench.compare("it", {"broken": broken, "missing": missing, "sound": broken})
    assert len(bench.record.rows) == 1


def test_a_row_is_written_before_the_next_variant_is_built(tmp_path):
    path = tmp_path / "rows.jsonl"
    bench = Bench(tiny=True, record=Record(path, "here"), seconds=1000.0)
    seen = []

    def build():
        seen.append([row["variant"] for row in Record(path, "here").rows])
        return Variant(lambda: 1.0)

    bench.compare("it", {"a": build, "b": build, "c": build})
    assert seen == [[], ["a"], ["a", "b"]]


def test_what_a_section_has_no_time_for_is_left_to_a_second_run(bench):
    bench.ends = time.monotonic() - 1
    bench.compare("it", {"late": lambda: 1 / 0})
    bench.check("that", lambda: 1 / 0)
    assert states(bench.record) == ["no time", "no time"]
    bench.record.note(ended=True)
    assert bench.record.state() == "no time"


def test_what_is_too_slow_has_no_time_and_did_not_fail(bench, monkeypatch):
    def slow():
        raise OutOfTime("not ready after 5 s")

    bench.check("it", slow)
    assert bench.record.items["it"]["state"] == "no time" and bench.record.items["it"]["text"] == "not ready after 5 s"

    # So does the sanitizer end a tool that is too slow.
    def endless(*args, timeout, **kwargs):
        raise subprocess.TimeoutExpired(args[0], timeout)

    monkeypatch.setattr(sanitizer.subprocess, "run", endless)
    monkeypatch.setattr(sanitizer.shutil, "which", lambda name: name)
    bench.tiny = False
    sanitizer.sanitizer(bench)
    assert {bench.record.items[tool]["state"] for tool in sanitizer.TOOLS} == {"no time"}


def test_a_record_is_whole_after_every_item(tmp_path):
    path = tmp_path / "rows.jsonl"
    append(path, {"run": {"device": "X"}})
    record = Record(path, "here")
    record.begin("one")
    assert Record(path, "here").current == "one"
    record.end("one", row={"us": 1.0})
    record.end("beside", "left out", "why")
    Record(path, "there").end("one")
    read = Record(path, "here")
    assert read.items.keys() == {"one", "beside"} and read.current is None and read.rows == [{"us": 1.0}]
    # Cut anywhere, the file has the whole lines before the cut, and goes on behind it.
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        Record(path, "here").end("after")
        states = {name: item["state"] for name, item in Record(path, "here").items.items()}
        assert states.pop("after") == "passed"
        assert list(states) == ["one", "beside"][: len(states)]
        whole_lines = whole[:cut].count(b"\n") + (whole[cut : cut + 1] == b"\n")
        assert len(states) == (0 if whole_lines < 2 else 1 if whole_lines < 4 else 2), cut


def test_a_new_run_forgets_what_did_not_pass(tmp_path):
    path = tmp_path / "rows.jsonl"
    for section in ("whole", "partly"):
        record = Record(path, section)
        record.end("passed", row={"us": 1.0})
        record.end("absent", "left out")
        record.note(ended=True)
    Record(path, "partly").end("broken", "failed")
    append(path, {"run": {}, "again": []})
    assert list(Record(path, "whole").items) == ["passed", "absent"]
    assert list(Record(path, "partly").items) == ["passed"] and Record(path, "partly").state() == "no time"
    append(path, {"run": {}, "again": ["whole"]})
    assert Record(path, "whole").items == {} and Record(path, "whole").state() == ""


# --- kills ------------------------------------------------------------------------------------------------------------

DRIVER = """
import sys
from benchmarks.gpu import run
from benchmarks.gpu.sections import Section
run.source = lambda: "this code"
table = {name: Section(f"gpu_sections:{name}", name, 60.0, 30.0, alone=name == "alone") for name in ("many", "alone")}
sys.exit(run.main(sys.argv[1:], sections=table, machine=Section("gpu_sections:machine", "", 60.0, 60.0)))
"""


def ended(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"  # dead, not yet reaped


@pytest.mark.thorough(0)
@pytest.mark.skipif(sys.platform != "linux", reason="workers end with their driver by Linux's prctl")
def test_a_run_that_is_killed_at_random_moments_keeps_its_rows_and_goes_on(tmp_path):
    support = f"{ROOT}:{ROOT / 'tests' / 'support'}"
    environment = {**os.environ, "PYTHONPATH": support, "GPU_SECTIONS_FOLDER": str(tmp_path)}
    command = [sys.executable, "-c", DRIVER, "--out", str(tmp_path / "out")]
    path, log = tmp_path / "out" / "a_fake_gpu" / report.FILE, tmp_path / "measured"
    log.touch()

    def rows():
        return [row["what"] for name in ("many", "alone") for row in Record(path, name).rows]

    def measured():
        return [line.split() for line in log.read_text().splitlines()]

    random, before, kills = Random(0), [], 3
    for _ in range(kills):
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)
        known = len(measured())
        while len(measured()) == known and process.poll() is None:  # not only in the start of Python
            time.sleep(0.01)
        time.sleep(random.uniform(0.0, 0.6))
        process.kill()
        process.wait()
        at_the_kill, deadline = len(measured()), time.monotonic() + 10
        while not all(ended(int(pid)) for pid, _ in measured()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert len(measured()) <= at_the_kill + 1, "a worker goes on without its driver"
        assert rows()[: len(before)] == before
        before = rows()
    assert subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL).returncode == 0
    assert rows() == [f"{section}-{i}" for section, count in (("many", 20), ("alone", 4)) for i in range(count)]
    assert len(measured()) <= 24 + kills  # a kill costs one measurement at most
    alone = [pid for pid, what in measured() if what.startswith("alone")]
    assert len(set(alone)) == len(alone)  # a process for each


# --- the report -------------------------------------------------------------------------------------------------------


def row(what, variant, **fields):
    return {"what": what, "variant": variant, "host_us": 1.0, **fields}


def stored(folder, *, tiny=False, device="GPU X", **sections):
    """The rows of sections, as a run on a GPU leaves them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / report.FILE
    append(path, {"run": {"tiny": tiny, "device": device, "versions": {"jax": "9"}}})
    for name, rows in sections.items():
        record = Record(path, name)
        for one in rows:
            record.end(f"{one['what']}, {one['variant']}", row=one)
        record.note(ended=True)
    return report.stored(folder)


DENSE = "Dense 8192x4096x4096, forward and backward"
STEPS = sections.STEPS
STACKED = "training step of stacked layers"


def test_targets_are_held_missed_or_not_measured(tmp_path):
    bus = [row("copy over the bus", way, us=1.0, bus_bytes_per_s=50e9) for way in ("in", "out")]
    steps = [row(STACKED, "device", us=1e6), row(STACKED, "host", us=1.5e6, bus_bytes=50e9)]
    records = stored(
        tmp_path,
        copy=[row("copy", "memcpy", us=1.0, bytes_per_s=4e12), row("copy", "kernel", us=1.0, bytes_per_s=3e12)],
        casts=[row("cast_transpose_amax, 8192x8192 bfloat16", "mosaic", us=1.0, bytes_per_s=3.6e12)],
        dense=[row(DENSE, "bf16", us=160.0), row(DENSE, "fp8 delayed", us=100.0)],
        gpt=[row(STEPS["GPT"], name, us=100.0, peak_mib=10.0, tokens_per_s=1e4) for name in ("bf16", "fp8 delayed")],
        llama=[row(STEPS["Llama"], name, us=100.0, tokens_per_s=1e4) for name in ("bf16", "fp8 delayed")],
        offload=[*bus, *steps],
    )
    targets = {(t["what"], t["at least"]): t for t in report.targets(records)}
    cast = targets["cast_transpose_amax, 8192x8192 bfloat16", "0.85 of the copy bandwidth"]
    assert cast["got"] == pytest.approx(0.9) and cast["holds"] is True
    assert targets[DENSE, "1.5 times as fast as bf16"]["got"] == pytest.approx(1.6)
    assert targets[STEPS["Llama"], "1.35 times as fast as bf16"]["holds"] is False
    assert targets[STEPS["GPT"], "1 no more memory than bf16"]["holds"] is True
    assert targets[STEPS["Llama"], "1 no more memory than bf16"]["holds"] is None  # a program that has no plan
    # 50 GB over the bus take a second alone; the step became half a second longer.
    assert targets[STACKED, "0.5 of the copies hidden"]["got"] == pytest.approx(0.5)
    # A program that gave no time is a miss; one that is left out is none.
    (record,) = stored(tmp_path / "skipped", skipped=[row("a kernel", "taken", us=1.0)])
    names = [f"multi_tensor_update {name}, 16 leaves" for name in list(launches.UPDATES)[1:4:2]]
    record.end(f"{names[0]}, taken", "left out", "no kernels")
    assert [t["holds"] for t in report.targets([record])] == [None, False]


def test_tables_are_written_from_files_and_only_where_something_was_measured(tmp_path, capsys):
    begin, end = markers("gpu")
    pages = {name: tmp_path / name for name in ("page", "front")}
    for page in pages.values():
        page.write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    assert report.write(tmp_path / "results", **pages) == 0
    assert "nothing to write" in capsys.readouterr().out
    assert pages["page"].read_text() == f"before\n{begin}\n{report.NOT_YET}\n{end}\nafter\n"
    assert pages["front"].read_text() == f"before\n{begin}\n\n{end}\nafter\n"
    rows = [row(DENSE, "bf16", us=160.0, flops_per_s=7e14), row(DENSE, "fp8 delayed", us=100.0, flops_per_s=11e14)]
    stored(tmp_path / "results" / "gpu_x", dense=rows)
    (tmp_path / "results" / "gpu_x" / "summary.md").write_text("")
    assert report.write(tmp_path / "results", **pages) == 0
    long, front = (pages[name].read_text() for name in ("page", "front"))
    assert "| dense " in long and "700.0" in long and "| TFLOP/s |" in long and "GPU X; jax 9." in long
    assert "GB/s" not in long and "peak MiB" not in long  # no column without numbers
    assert "| 1.5 times as fast as bf16 | 1.60" in long
    assert "| on GPU X " in front and "1.60" in front and STEPS["GPT"] not in front + long
    assert "![Speedups on GPU X](results/gpu_x/speedups.svg)" in long
    # Toy sizes measure nothing.
    stored(tmp_path / "results" / "gpu_x", tiny=True)
    report.write(tmp_path / "results", **pages)
    assert report.NOT_YET in pages["page"].read_text()


def test_the_short_table_answers_what_a_reader_asks_first(tmp_path):
    """In its order: right; GEMMs; steps; the optimizer; casts. Each beside its roofline where the device has one."""
    device, flops = "NVIDIA H100 80GB HBM3", 6.0 * 8192 * 4096
    gemms = []
    for n_in, n_out in sections.SIDES:
        work = flops * n_in * n_out / 4096
        for variant, us in (("bf16", 2400.0), ("fp8 current", 1200.0)):
            fields = {"us": us, "flops_per_s": work / us * 1e6, "gemms_in": variant.split()[0]}
            gemms.append(row(sections.DENSE.format(8192, n_in, n_out), variant, **fields))
    counted = {r["row"]: r["ms"] for r in json.loads(roofline.COUNTED.read_text())["rows"]}
    step = {"tokens_per_s": 4e4, "peak_mib": 2048.0, "flops_per_s": 1e15, "attention": "cudnn"}
    fused, hand = "jaxmp.fused_adamw, fp16", "by hand, select: fp16 params, fp32 masters, clip, adamw"
    cast = sections.CASTS.format(8192, "bfloat16")
    lines = report.answers(
        stored(
            tmp_path,
            device=device,
            copy=[row("copy", "memcpy", us=1.0, bytes_per_s=4e12)],
            right=[row("Dense", "bf16", gap_y=0.0)],
            dense=gemms,
            llama=[
                row(STEPS["Llama"], name, us=us, step=f"Llama, linen, {name}", **step)
                for name, us in (("bf16", 3e5), ("fp8 delayed", 2e5))
            ],
            optimizer=[
                row(sections.OPTIMIZER, fused, us=100.0, bytes_per_s=3.6e12),
                row(sections.OPTIMIZER, hand, us=150.0),
                row(sections.OPTIMIZER, "optax.clip + adamw, f32, no scaling", us=140.0),
            ],
            casts=[row(cast, "xla", us=90.0), row(cast, "mosaic", us=100.0, bytes_per_s=2e12)],
        ),
        device,
    )
    speedups = [line.speedup and round(line.speedup, 2) for line in lines]
    assert speedups == [None, None, 2.0, None, 2.0, None, 1.5, 1.5, 1.4, 0.9]
    right, _, dense, bf16, twelve, _, fp8, by_hand, by_optax, casts = lines
    assert right.measured == "1 of 1 passed"
    assert dense.least_us == pytest.approx(flops * 4096 / 1150e6)
    whole = sum(flops * n_in * n_out / 4096 for n_in, n_out in sections.SIDES)
    assert twelve.least_us == pytest.approx(whole / 1150e6) and twelve.measured == "4.80 ms"
    assert bf16.least_us == pytest.approx(whole / 650e6) and bf16.measured == "9.60 ms"
    assert fp8.measured == "200.0 ms, 40.0 k tokens/s, 2.0 GiB"
    assert fp8.least_us == pytest.approx(1e3 * counted["Llama, linen, fp8 delayed"], abs=5)  # three rounded parts
    assert by_hand.least_us == pytest.approx(2 + 3.6e8 / 2.9e6) and casts.least_us == pytest.approx(2 + 2e8 / 2.9e6)
    assert casts.measured.startswith("slower") and by_optax.measured.startswith("faster")
    # The picture has a bar for each speedup.
    text = report.short(tmp_path, tmp_path.parent)
    assert f"]({tmp_path.name}/{report.PICTURE})" in text and "| 0.90 " in text
    assert "| by roofline | of it |" in text and f"| {counted['Llama, linen, fp8 delayed']:.2f} ms" in text
    drawn = ElementTree.parse(tmp_path / report.PICTURE).getroot()
    assert len(drawn.findall("{*}rect")) == 1 + sum(speedup is not None for speedup in speedups)
    # Without one of the 12 there is no sum, here of fp8.
    fewer = report.answers(stored(tmp_path / "fewer", dense=gemms[:-1]), device)
    assert [line.what.split(",")[0] for line in fewer] == ["Dense 4096x4096"] * 2 + ["12 GEMMs of a layer"]


def test_the_short_table_has_both_ways_of_the_casts(tmp_path):
    """The one of the table beside the other, which is faster here."""
    ways = []
    for i, sides in enumerate(sections.SIDES):
        what = sections.CAST_WAYS.format(8192, *sides)
        ways += [row(what, way, us=us + i, table="one pass") for way, us in (("one pass", 90.0), ("two passes", 80.0))]
    (line,) = report.answers(stored(tmp_path / "ways", casts=ways), "a GPU")
    assert line.what == "12 GEMMs, casts in one pass (`fp8/cast_ways.py`), beside two passes"
    assert line.measured == "slower: 366 us, the other 326 us" and line.speedup == pytest.approx(326 / 366)
    assert report.answers(stored(tmp_path / "one way", casts=ways[:-1]), "a GPU") == []


def test_both_pages_have_their_markers():
    begin, end = markers("gpu")
    for page in (report.README, report.FRONT):
        assert page.read_text().count(begin) == page.read_text().count(end) == 1


@pytest.mark.parametrize(
    ("fp8_us", "width"), [((9, 9, 9), 512), ((11, 9, 9), 1024), ((9, 11, 9), 2048), ((9, 9, 11), None)]
)
def test_fp8_pays_from_the_width_behind_which_it_always_does(fp8_us, width):
    rows = []
    for w, us in zip(sections.WIDTHS, fp8_us, strict=True):
        what = sections.STEP.format("Llama", w, 1)
        rows += [row(what, "bf16", us=10), row(what, "fp8 delayed", us=us, params=w * w)]
    crossover = report.pays_from(rows)
    assert crossover["width"] == width
    if width:
        assert (crossover["layers"], crossover["params"]) == (width // 128, width // 128 * width**2)


def test_a_least_time_is_that_of_its_device_and_of_the_program_that_was_counted():
    counted = json.loads(roofline.COUNTED.read_text())["rows"][0]
    step = {"step": counted["row"], "attention": "cudnn", "us": 1e6}
    h100, h200 = (roofline.least_us(step, device) for device in roofline.DEVICES)
    assert h100 == pytest.approx(1e3 * counted["ms"], abs=5)
    assert h100 - h200 == pytest.approx(1e3 * counted["rest_ms"] * (1 - 3.35 / 4.8))
    assert roofline.least_us(step, "NVIDIA A100") is None  # not counted for it
    assert roofline.least_us(step | {"attention": "xla"}, "NVIDIA H200") is None  # another program
    assert roofline.least_us(step | {"step": "GPT, linen, bf16 by foot"}, "NVIDIA H200") is None
    assert roofline.least_us({"us": 1.0}, "NVIDIA H200") is None


def test_every_target_is_of_a_row_that_a_section_makes():
    """By name: a target of a row that no section makes would always be missed."""
    skipped = {soundness.SKIPPED.format(name) for name in launches.UPDATES}
    assert {target.what for target in report.all_targets() if target.section == "skipped"} <= skipped
    assert {offload.UPDATE, offload.STEP} <= {target.what for target in report.all_targets()}
    assert {target.section for target in report.all_targets()} <= set(sections.SECTIONS)
    programs = {p.name for p in optimizer.on_one_device()}
    pairs = [(t.of, t.by) for t in report.all_targets() if t.section == "optimizer"]
    assert {field[0] for pair in pairs for field in pair if field} <= programs
    assert {stack.kind: (stack.layers, stack.width) for stack in steps.STACKS} == sections.STACKS
    assert set(models.FIRST) < set(steps.PRECISIONS)


# --- sections that compile --------------------------------------------------------------------------------------------


@pytest.mark.thorough(0)
def test_all_sections_end_well_in_tiny_sizes(tmp_path):
    """`make gpu ARGS=--tiny`, whole: minutes."""
    command = ["make", "gpu", f"PYTHON={sys.executable}", f"ARGS=--tiny --out {tmp_path}"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    path = tmp_path / "cpu" / report.FILE
    assert {"python", "jax", "flax", "optax"} <= run_of(path)["versions"].keys() and run_of(path)["tiny"]
    for name in sections.SECTIONS:
        record = Record(path, name)
        assert record.state() == "passed", report.wrong(record)
    copies = Record(path, "copy").rows
    assert [row["variant"] for row in copies] == ["memcpy", "kernel"]
    assert all(0 < row["low_us"] <= row["us"] <= row["high_us"] and row["bytes_per_s"] > 0 for row in copies)
