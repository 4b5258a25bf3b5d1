"""The private rooms of jaxmp: a room imports only rooms below it; the list stands in pyproject.toml."""
