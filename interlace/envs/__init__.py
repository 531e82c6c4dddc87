"""Environments: simulators behind one vector interface whose unit is a chunk of actions."""
