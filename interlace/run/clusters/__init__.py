"""Cluster back ends by name."""
