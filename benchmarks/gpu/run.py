"""Tests kernels and times kernels, layers and steps on a GPU, in under 8 minutes; every section in its own process."""

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import report
from benchmarks.gpu.sections import MACHINE, SECTIONS, WHOLE, Section
from benchmarks.gpu.worker import DEVICE_LOST, NEXT_PROCESS
from benchmarks.lib.record import CRASHED, HUNG, KILLED, NO_TIME, PASSED, TEXT, Record, append, run_of
from benchmarks.lib.tables import RESULTS, ROOT
from benchmarks.lib.versions import source

FOLDER = RESULTS / "gpu"
TINY = ROOT / "build" / "gpu"
COMPILED = ROOT / "build" / "compiled"  # programs, for later processes and runs
SLOWER = 20.0  # how much longer everything may take in tiny sizes: interpreted kernels, on a machine with other work
GRACE = 10.0  # seconds after a section's time until its process is killed
FAULTS = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGTRAP}


class Stopped(Exception):
    """The driver got a signal."""


def main(arguments: Sequence[str], *, sections: Mapping[str, Section] = SECTIONS, machine: Section = MACHINE) -> int:
    """Runs what the command line asks for; returns the exit status."""
    options = parse_arguments(arguments, sections)
    if options.report:
        return report.write(FOLDER if options.out is None else options.out)
    started = time.monotonic()
    ends = started + options.limit
    out = options.out or (TINY if options.tiny else FOLDER)
    out.mkdir(parents=True, exist_ok=True)
    runner = Runner(options.tiny, unpacked(options.wheels))
    stopped = False
    before = {s: signal.signal(s, _stop) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        try:
            about = look(runner, machine, out, options, ends)
        except Stopped as e:
            about = f"stopped by {e} before anything was measured"
        if isinstance(about, str):
            print(about, file=sys.stderr)
            return 2
        folder = out / re.sub(r"\W+", "_", about["device"]).strip("_").lower()
        folder.mkdir(exist_ok=True)
        try:
            run_sections(runner, {name: sections[name] for name in options.sections}, folder, about, options, ends)
        except Stopped as e:
            stopped = True
            print(f"stopped by {e}: the same command goes on here", flush=True)
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)
    records = [Record(folder / report.FILE, name) for name in options.sections]
    report.write_junit(folder / "junit.xml", records)
    text = report.summary(records, about)
    (folder / "summary.md").write_text(text + "\n")
    missed = [] if options.tiny else [t for t in report.targets(records) if t["holds"] is False]
    if out == FOLDER:
        report.write(FOLDER)
    if not options.tiny:
        print(report.tables(folder), end="\n\n")
    print(text)
    print(*(f"target missed: {t['what']}: {t['got']}, at least {t['at least']}" for t in missed), sep="\n")
    print(report.short(folder, folder))
    print(f"{time.monotonic() - started:.0f} s; the files are in {folder}")
    well = not stopped and not missed and all(record.state() == PASSED for record in records)
    return 0 if well else 1


def parse_arguments(arguments: Sequence[str], sections: Mapping[str, Section]) -> argparse.Namespace:
    """The command line; argparse, because this also runs where tyro is missing."""
    description = (__doc__ or "").split("\n")[0]
    about = "; ".join(f"{name}: {section.about}" for name, section in sections.items())
    parser = argparse.ArgumentParser(prog="python -m benchmarks gpu", description=description, epilog=about)
    parser.add_argument("--sections", default=",".join(sections), help="some of them, separated by commas")
    parser.add_argument("--tiny", action="store_true", help="toy sizes and interpreted kernels, on a CPU")
    parser.add_argument("--out", type=Path, help="folder for the results (results/gpu; with --tiny build/gpu)")
    parser.add_argument("--wheels", type=Path, help="folder of wheels of packages that this interpreter lacks")
    parser.add_argument("--limit", type=float, help=f"seconds for everything ({WHOLE:.0f})")
    parser.add_argument("--add", action="store_true", help="keep sections that passed with other code, too")
    parser.add_argument("--again", action="store_true", help="run again what passed before, too")
    parser.add_argument("--report", "--table", action="store_true", help="only write tables, from the stored results")
    options = parser.parse_args(arguments)
    options.sections = [name for name in options.sections.split(",") if name]
    if unknown := sorted(set(options.sections) - set(sections)):
        parser.error(f"sections are {', '.join(sections)}; got {', '.join(unknown)}")
    if options.limit is None:
        options.limit = WHOLE * (SLOWER if options.tiny else 1)
    if options.wheels and not list(options.wheels.glob("*.whl")):
        parser.error(f"no wheels in {options.wheels}; benchmarks/gpu/pack.sh {options.wheels} makes them")
    if options.tiny and options.out and options.out.resolve() == FOLDER:
        parser.error("--tiny does not measure a GPU: set another folder for its results with --out")
    return options


def unpacked(wheels: Path | None) -> Path | None:
    """A temporary folder with the content of the wheels: a wheel is a zip file, so nothing need be installed."""
    if wheels is None:
        return None
    folder = Path(tempfile.mkdtemp(prefix="gpu-wheels-"))
    for wheel in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(wheel) as packed:
            packed.extractall(folder)
        for kind in ("purelib", "platlib"):
            for inner in folder.glob(f"*.data/{kind}/*"):
                inner.rename(folder / inner.name)
    return folder


def look(
    runner: "Runner", machine: Section, out: Path, options: argparse.Namespace, ends: float
) -> dict[str, Any] | str:
    """What this machine has; or why nothing can be measured."""
    path = out / "machine.jsonl"
    path.unlink(missing_ok=True)
    record = runner.run("machine", machine, path, ends)
    about = next(iter(record.rows), None)
    if record.about["missing"]:
        return (
            f"{sys.executable} has no {record.about['missing']}. Name the interpreter that has jax for CUDA: "
            "make gpu PYTHON=/path/to/python3; packages that it lacks come from a folder: ARGS='--wheels FOLDER'"
        )
    if about is None:
        texts = [item["text"] for item in record.items.values()]
        return "\n".join(["jax does not find its device:", record.about["error"], *texts])
    if not options.tiny and about["platform"] not in ("gpu", "cuda"):
        return f"this needs an NVIDIA GPU; jax found {about['device']}. To run on a CPU, use --tiny."
    about |= {"source": source(), "tiny": options.tiny}
    print(f"{about['device']}: {', '.join(f'{k} {v}' for k, v in about['versions'].items())}")
    print(f"missing packages: {', '.join(about['missing']) or 'none'}", flush=True)
    return about


def run_sections(
    runner: "Runner",
    sections: Mapping[str, Section],
    folder: Path,
    about: Mapping[str, Any],
    options: argparse.Namespace,
    ends: float,
) -> None:
    """Runs what is still to run: first what never ran, then what did not end well before."""
    path = folder / report.FILE
    header = {key: about[key] for key in ("device", "versions", "source", "tiny")}
    last = run_of(path)
    adds = options.add and last | {"source": header["source"]} == header
    if last != header and not adds:
        path.unlink(missing_ok=True)
    before = {name: Record(path, name).state() for name in sections}
    of_other_code = [name for name in sections if before[name] != PASSED and last != header]  # none is of two codes
    append(path, {"run": header, "again": list(sections) if options.again else of_other_code})
    for name in sorted(sections, key=lambda name: before[name] not in ("", NO_TIME)):
        if Record(path, name).state() == PASSED:
            print(f"{name:20}kept: it passed before", flush=True)
            continue
        left = ends - time.monotonic()
        if left < min(5.0, sections[name].limit):
            print(f"{name:20}not started: the time for the whole run was over", flush=True)
            continue
        record = runner.run(name, sections[name], path, ends)
        counts = ", ".join(f"{n} {state}" for state, n in record.counts().items())
        print(f"{name:20}{record.state() or 'nothing ran':10}{record.about['seconds']:7.1f} s   {counts}", flush=True)
        for row in record.rows:
            if "us" in row:
                print(f"    {row['what']}, {row['variant']}: {row['us']:.1f} us", flush=True)
        for item, what in report.wrong(record):
            print(f"    {item}: {what}", flush=True)


class Runner:
    """Starts the processes of sections, and ends them."""

    def __init__(self, tiny: bool, packages: Path | None):
        self.tiny, self.packages = tiny, packages
        self.environment = dict(os.environ)
        self.environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        self.environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory too
        self.environment["PYTHONUNBUFFERED"] = "1"
        self.environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(COMPILED))
        self.environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.3")
        if tiny:
            self.environment["JAX_PLATFORMS"] = "cpu"

    def run(self, name: str, section: Section, path: Path, ends: float) -> Record:
        """Runs a section to its end. If its process dies in an item, a new one goes on behind that item."""
        begun = time.monotonic()
        slower = SLOWER if self.tiny else 1.0
        stops = min(begun + section.limit * slower, ends)
        spent = Record(path, name).about["seconds"]
        while True:
            seconds = max(1.0, stops - time.monotonic())
            command = [sys.executable, "-m", "benchmarks.gpu.worker", name, section.runs, "--record", str(path)]
            command += ["--seconds", f"{seconds:.1f}", "--item", str(section.item * slower)]
            command += ["--parent", str(os.getpid())]
            command += ["--packages", str(self.packages)] * (self.packages is not None)
            command += ["--alone"] * section.alone + ["--tiny"] * self.tiny
            log = path.with_name(f"{name}.log")
            status, text = self._process(command, self.environment | dict(section.environment), log, seconds + GRACE)
            record = Record(path, name)
            late = status is None and time.monotonic() > stops
            goes_on = not record.about["ended"] and _note_death(record, status, text, late=late)
            if not goes_on or time.monotonic() > stops:
                record.note(seconds=round(spent + time.monotonic() - begun, 1))
                return record

    @staticmethod
    def _process(command: list[str], environment: dict[str, str], log: Path, seconds: float) -> tuple[int | None, str]:
        """(exit status, or None if it was killed for its time; the end of its output)."""
        with log.open("ab") as output:
            start = output.tell()
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdout=output, stderr=output, start_new_session=True
            )
            try:
                status: int | None = process.wait(seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # its children too
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE)  # a process that hangs in a driver may never end: not waited for
        text = log.read_bytes()[start:].decode(errors="replace")
        return status, text.replace(f"{ROOT}/", "").replace(sys.prefix, "<python>")


def _note_death(record: Record, status: int | None, text: str, *, late: bool) -> bool:
    """Notes in which item a process died and how; returns whether a new process can go on behind it."""
    if status in (DEVICE_LOST, NEXT_PROCESS) and record.current is None:
        return True  # the item stands in the record
    if late:
        state, how = NO_TIME, "still running when the section's time was over"
    elif status is None or "Timeout (" in text:
        state, how = HUNG, "ended after its time limit"
    elif status < 0:
        name = signal.Signals(-status).name
        state, how = (CRASHED if -status in FAULTS else KILLED), f"ended by {name}"
    else:
        state, how = CRASHED, f"ended with exit status {status} before its end"
    item, message = record.current, f"{how}\n{text[100 - TEXT :]}"
    if item is None:  # before the first item, or between two: nothing to go on behind
        if not late:
            record.note(error=message)
        return False
    record.end(item, state, message)
    return True


def _stop(number: int, frame: Any) -> None:
    del frame
    raise Stopped(signal.Signals(number).name)
