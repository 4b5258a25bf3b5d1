"""Where arrays lie, and what devices tell each other."""
