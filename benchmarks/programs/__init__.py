"""The programs that are measured: models and steps, with jaxmp and without it."""
