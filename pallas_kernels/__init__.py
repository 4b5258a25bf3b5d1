"""Kernels in Pallas for the passes over memory that XLA does not fuse by itself; usable without `jaxmp`.

What belongs here, one idea to a file:

- this file dispatches: each public function takes `backend=`, "auto" (mosaic where it can run, else xla) or the name
  of one, and a named backend that cannot serve raises and says why;
- `reference`: every function in plain jax.numpy, at once the oracle of the tests and the "xla" backend;
- `backend`: what this device and this jax version can run;
- one file for each kernel.

It is the bottom layer: nothing here imports `jaxmp`, and an import contract holds that. The package is empty until the
first kernel lands with its reference and its tests.
"""
