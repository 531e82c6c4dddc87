"""Rollout engines as services: clients of servers with an address, and the servers that a run starts."""
