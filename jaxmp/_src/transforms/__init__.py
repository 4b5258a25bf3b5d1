"""Optax transforms to use inside `mixed_precision` or around it: clipping, averages, fused optimizers."""
