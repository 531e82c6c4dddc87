"""What each command does: train, evaluate, compare, simulate, replay ... over a checked recipe."""
