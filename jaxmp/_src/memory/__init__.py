"""What a step keeps in memory: the plan, and what can lie in host memory."""
