"""What several tests of fp8 share."""

import jax
import pytest

from pallas_kernels import passes


@pytest.fixture
def interpreted(monkeypatch):
    """Where a kernel can run on a GPU, it is interpreted."""
    run_or = passes.run_or

    def on_this_device(plan, instead, args, backend="auto", **more):
        in_kernel = backend == "auto" and not passes.why_not(plan, args)
        return run_or(plan, instead, args, "interpret" if in_kernel else "xla", **more)

    def switch():
        monkeypatch.setattr(passes, "run_or", on_this_device)
        jax.clear_caches()

    yield switch
    monkeypatch.undo()
    jax.clear_caches()
