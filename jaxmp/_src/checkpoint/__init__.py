"""Saves, restores and converts the state of a job, and imports it from other systems."""
