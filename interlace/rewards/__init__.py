"""Rewards: verifiers by name, one file each, and a user's own functions, scored with real time limits."""
