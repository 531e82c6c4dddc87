"""Experiments as data: the settings of every part, checked together, then run."""
