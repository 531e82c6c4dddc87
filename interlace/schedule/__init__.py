"""Description of how a flow runs, as data, and the pure, synchronous rules that follow. Never iterates a set."""
