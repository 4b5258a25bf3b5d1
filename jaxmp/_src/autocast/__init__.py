"""A function rewritten to 16 bits, and hooks at its modules."""
