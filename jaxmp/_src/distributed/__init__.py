"""Params cut over devices, and gradients reduced."""
