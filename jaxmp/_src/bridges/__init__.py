"""Bridges to flax.linen and flax.nnx, with the fp8 layers of both."""
