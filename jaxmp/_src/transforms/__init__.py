"""Optax transforms to put inside or around: clipping, averages, fused optimizers."""
