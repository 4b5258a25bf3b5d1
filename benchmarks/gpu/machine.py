"""The first process of the GPU run: what this machine has."""

import importlib.util
import shutil
import subprocess
from typing import Any

from benchmarks.lib.timing import Bench
from benchmarks.lib.versions import GPU, versions

NEEDED = ("jax", "flax", "optax", "jmp", "jaxtyping", "pytest", "rich")
USED = ("haiku", "equinox")  # without them some tests are left out


def machine(bench: Bench) -> None:
    """The device, the versions, and the packages that are missing."""
    missing = [name for name in (*NEEDED, *USED) if importlib.util.find_spec(name) is None]
    row: dict[str, Any] = {"what": "machine", "versions": versions((), optional=GPU)}
    row |= {"missing": missing, "driver": _driver(), "compute_sanitizer": shutil.which("compute-sanitizer") is not None}

    def device() -> dict[str, Any]:
        import jax

        first = jax.devices()[0]
        about = {"device": first.device_kind, "platform": first.platform, "devices": jax.device_count()}
        capability = getattr(first, "compute_capability", None)
        return row | about | ({} if capability is None else {"compute_capability": capability})

    if "jax" in missing:
        raise ModuleNotFoundError("No module named 'jax'", name="jax")
    bench.check("device", device)


def _driver() -> str:
    """What nvidia-smi says of the GPUs; "" without it."""
    command = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
