"""What jaxmp costs, measured and counted; `python -m benchmarks --help` lists the entries."""
