"""Cuts params over devices and reduces gradients."""
