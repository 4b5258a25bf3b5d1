"""Roundings, bits and formats; numerically safe functions for models."""
