"""Looks at calls of the public functions before, and at results after: raises or warns, and decides no number."""
