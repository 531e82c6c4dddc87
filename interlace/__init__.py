"""interlace: reinforcement-learning post-training where the flow is written once and the way it runs is data."""

__version__ = "0.1.0"
