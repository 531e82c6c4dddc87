"""Serving of a robot's policy: observations in, chunks of actions out."""
