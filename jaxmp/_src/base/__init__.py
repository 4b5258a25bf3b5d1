"""Helpers for Python and jax that know nothing of training."""
