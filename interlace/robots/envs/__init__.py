"""Environments: simulators with one vector interface, which executes chunks of actions."""
