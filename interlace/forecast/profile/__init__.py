"""Measured costs of each worker on this machine, and the profile that stores them."""
