"""Where arrays are stored, and what devices send to each other."""
