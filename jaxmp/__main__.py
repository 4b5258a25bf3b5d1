"""`python -m jaxmp`: what jaxmp does on this machine.

python -m jaxmp doctor       versions, devices, which backend runs each operation and why, and what to do next
python -m jaxmp --version    the version
"""

import argparse
import importlib.metadata
import platform
import sys
from collections import Counter
from collections.abc import Sequence

import jax

import jaxmp
from jaxmp._src.base import tables
from jaxmp._src.fp8 import backends
from jaxmp._src.step import next_steps

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "jmp")  # that are installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxmp", description="What jaxmp does on this machine.")
    parser.add_argument("--version", action="version", version=f"jaxmp {jaxmp.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="command", dest="command")
    commands.add_parser("doctor", help="versions, devices, the backend of each operation, and what to do next")
    if parser.parse_args(arguments).command == "doctor":
        _print_backends()
    else:
        parser.print_help()
    return 0


def _print_backends() -> None:
    print(f"jaxmp {jaxmp.__version__}: {', '.join(_versions())}\n")
    print(*_devices(), "", sep="\n")
    print(tables.columns([("operation", "backend", "because, or where"), *backends.backends()]))
    print("\nWhat to do next:", *next_steps.next_steps(), sep="\n- ")


def _versions() -> list[str]:
    lines = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            lines.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return lines


def _devices() -> list[str]:
    kinds = Counter((d.device_kind, getattr(d, "compute_capability", None)) for d in jax.devices())
    return [
        f"{n} x {kind}" + (f", compute capability {capability}" if capability else "")
        for (kind, capability), n in kinds.items()
    ]


if __name__ == "__main__":
    sys.exit(main())
