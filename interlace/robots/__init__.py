"""Embodied agents: environments, action models, the replay buffer and the world model."""
