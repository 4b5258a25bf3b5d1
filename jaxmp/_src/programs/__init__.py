"""A function as a jaxpr: traced, read, run in parts."""
