"""Which module of a model can run in which format."""
