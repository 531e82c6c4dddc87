"""Prompts: where they come from, how they are put to the model, the order they are served in, and warm-up examples."""
