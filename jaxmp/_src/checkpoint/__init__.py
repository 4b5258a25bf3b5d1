"""The state of a job: saved, restored, converted, taken from other systems."""
