"""The loops, readable as the paper's pseudocode."""
