"""What each command does: train, evaluate, compare, simulate ... over a checked recipe."""
