"""Work behind each command: train, evaluate, compare, simulate ... over a checked recipe."""
