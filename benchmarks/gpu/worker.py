"""Runs one section of the GPU run in a process of its own; the driver (`benchmarks.gpu.run`) starts it.

    python -m benchmarks.gpu.worker copy benchmarks.gpu.kernels:copy --record FILE --seconds 25 --item 20 [--tiny]

It goes on where the record stops: items in the record are not run again. Its exit status is 0 whenever the section came
to its end; what failed stands in the record.
"""

import argparse
import faulthandler
import importlib
import os
import sys
import traceback
from pathlib import Path

from benchmarks.lib.record import FAILED, TEXT, Record
from benchmarks.lib.timing import Bench, DeviceLost

DEVICE_LOST = 86  # exit status: the rest needs a new process


def main(arguments: list[str]) -> int:
    """Runs the section; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.worker")
    parser.add_argument("name")
    parser.add_argument("runs")
    parser.add_argument("--record", type=Path, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--item", type=float, required=True)
    parser.add_argument("--packages", type=Path)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args(arguments)
    faulthandler.enable()
    if options.packages:
        sys.path.append(str(options.packages))  # at the end: what the interpreter has goes first
    record = Record(options.record, options.name, limit=options.item)
    bench = Bench(tiny=options.tiny, record=record, seconds=options.seconds, packages=options.packages)
    module, _, function = options.runs.partition(":")
    try:
        getattr(importlib.import_module(module), function)(bench)
    except DeviceLost:
        record.save()
        sys.stdout.flush()
        os._exit(DEVICE_LOST)  # without the clean-up of a device that no longer answers
    except ModuleNotFoundError as e:
        if e.name and e.name.split(".")[0] in ("benchmarks", "jaxmp", "pallas_kernels"):
            record.data["error"] = traceback.format_exc()[-TEXT:]
        else:
            record.data["missing"] = e.name or str(e)
            record.data["error"] = str(e)
    except Exception:  # of a benchmark, of any kind: it is recorded, and what ran before it stays in the record
        if record.data["current"] is not None:
            record.end(record.data["current"], FAILED, traceback.format_exc())
        else:
            record.data["error"] = traceback.format_exc()[-TEXT:]
    if not (record.items or record.data["error"]):
        record.data["error"] = "the section ran nothing"
    record.data["ended"] = True
    record.save()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
