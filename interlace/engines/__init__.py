"""Engines: rollout and training."""
