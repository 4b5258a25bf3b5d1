"""Times on the GPU of this machine."""
