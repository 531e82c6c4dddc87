"""Recorded episodes of robots, and their exchange with other programs."""
