"""Replay buffer of trajectories, its files, and the flow that trains from it."""
