"""Programs compiled for an H100 and counted; no GPU is needed."""

from benchmarks.lib import aot as aot  # before jax is imported: makes jax run on the CPU of this machine
