"""Watches a run: statistics of tensors, rules, plots."""
