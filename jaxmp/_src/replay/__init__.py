"""One step run again: which leaf, which operation, numbers or machine."""
