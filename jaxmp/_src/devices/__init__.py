"""Where arrays are stored, and what devices send each other."""
