"""fp8: recipes, scale leaves, matmuls."""
