"""Plans the memory of a step, and keeps state and layers in host memory."""
