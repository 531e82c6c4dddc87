"""Environments: simulators with one vector interface, whose unit is a chunk of actions."""
