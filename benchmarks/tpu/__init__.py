"""Entries of `python -m benchmarks tpu`: programs compiled for TPUs, without having one."""
