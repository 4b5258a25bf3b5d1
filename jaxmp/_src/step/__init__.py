"""One training step: policy, gradients, unscale, decide, masters, scales."""
