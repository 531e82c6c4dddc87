"""Prompts: their sources, their text and tokens, their order, and warm-up examples."""
