"""Conversations as tokens and back: what a model's chat template writes, and what its answers mean."""
