"""What knows Python and jax, and nothing of training."""
