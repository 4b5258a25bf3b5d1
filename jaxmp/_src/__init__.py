"""The private rooms of jaxmp. A room imports only rooms below it; pyproject.toml lists the order."""
