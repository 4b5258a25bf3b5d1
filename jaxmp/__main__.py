"""`python -m jaxmp`: what this installation is, and what serves it on this machine.

python -m jaxmp              the same as
python -m jaxmp backends     versions, devices, and which backend runs each operation, with the reason
"""

import argparse
import importlib.metadata
import platform
import sys
from collections import Counter
from collections.abc import Sequence

import jax

import jaxmp
from jaxmp import _backends

_PACKAGES = ("jax", "jaxlib", "jax-cuda13-plugin", "jax-cuda12-plugin", "flax", "optax", "jmp")  # that are installed


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m jaxmp", description="What jaxmp does on this machine.")
    parser.set_defaults(run=_print_backends)
    commands = parser.add_subparsers(title="commands", metavar="command")
    command = commands.add_parser("backends", help="versions, devices, and what serves each operation (the default)")
    command.set_defaults(run=_print_backends)
    return parser.parse_args(arguments).run()


def _print_backends() -> int:
    print(f"jaxmp {jaxmp.__version__}: {', '.join(_versions())}\n")
    print(*_devices(), "", sep="\n")
    print(_table([("operation", "backend", "because, or where"), *_backends.backends()]))
    return 0


def _versions() -> list[str]:
    found = [f"python {platform.python_version()}"]
    for package in _PACKAGES:
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _devices() -> list[str]:
    kinds = Counter((d.device_kind, getattr(d, "compute_capability", None)) for d in jax.devices())
    return [
        f"{n} x {kind}" + (f", compute capability {capability}" if capability else "")
        for (kind, capability), n in kinds.items()
    ]


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


if __name__ == "__main__":
    sys.exit(main())
