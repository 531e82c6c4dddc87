"""The training loops, written like the pseudocode of a paper."""
