"""A run as it is watched: statistics of tensors, rules, plots."""
