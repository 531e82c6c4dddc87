"""World model trained from the replay buffer, and the episodes imagined with it."""
