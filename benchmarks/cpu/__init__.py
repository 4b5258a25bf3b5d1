"""Times on this CPU."""
