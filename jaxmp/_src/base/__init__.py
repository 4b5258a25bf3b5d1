"""Helpers for Python and jax that do not depend on training."""
