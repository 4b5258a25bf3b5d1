"""Runs one section of the GPU run in a process of its own; the driver (`benchmarks.gpu.run`) starts it."""

import argparse
import ctypes
import faulthandler
import importlib
import os
import signal
import sys
import traceback
from pathlib import Path

from benchmarks.lib.record import FAILED, TEXT, Record
from benchmarks.lib.timing import Bench, DeviceLost, NextProcess

DEVICE_LOST = 86  # exit status: the rest needs a new process
NEXT_PROCESS = 87  # exit status: the next item wants a process of its own
DEATH_OF_PARENT = 1  # PR_SET_PDEATHSIG of Linux's prctl


def main(arguments: list[str]) -> int:
    """Runs the section from where the record stops; returns the exit status, 0 whenever the section came to its end.

    What failed stands in the record. The process ends with its driver, also if that is killed.
    """
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.worker")
    parser.add_argument("name")
    parser.add_argument("runs")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--item", type=float, required=True)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--alone", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parent", type=int)
    options = parser.parse_args(arguments)
    faulthandler.enable()
    if options.packages:
        sys.path.append(str(options.packages))  # at the end: what the interpreter has goes first
    if options.parent and sys.platform == "linux":
        ctypes.CDLL(None).prctl(DEATH_OF_PARENT, signal.SIGKILL)
        if os.getppid() != options.parent:
            return 1  # it died before that
    record = Record(options.record, options.name, limit=options.item)
    bench = Bench(
        tiny=options.tiny,
        record=record,
        seconds=options.seconds,
        packages=options.packages,
        alone=options.alone,
    )
    module, _, function = options.runs.partition(":")
    try:
        getattr(importlib.import_module(module), function)(bench)
    except NextProcess:
        return NEXT_PROCESS
    except DeviceLost:
        sys.stdout.flush()
        os._exit(DEVICE_LOST)  # without the clean-up of a device that no longer answers
    except ModuleNotFoundError as e:
        if e.name and e.name.split(".")[0] in ("benchmarks", "jaxmp", "pallas_kernels"):
            record.note(error=traceback.format_exc()[-TEXT:])
        else:
            record.note(missing=e.name or str(e), error=str(e))
    except Exception:  # of a benchmark, of any kind: it is recorded, and what ran before it stays in the record
        if record.current is not None:
            record.end(record.current, FAILED, traceback.format_exc())
        else:
            record.note(error=traceback.format_exc()[-TEXT:])
    if not (record.items or record.about["error"]):
        record.note(error="the section ran nothing")
    record.note(ended=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
