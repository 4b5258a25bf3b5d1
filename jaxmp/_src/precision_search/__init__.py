"""Finds out which module of a model can run in which format."""
