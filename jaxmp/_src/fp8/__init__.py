"""fp8: recipes, scale leaves, stored kernels, matmuls."""
