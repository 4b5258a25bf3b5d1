"""What several benchmarks use: tables, shapes of models, compiling for an H100, clocks."""
