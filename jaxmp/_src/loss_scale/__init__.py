"""Loss scales: the rule and its state, without optax."""
