"""Isolated execution of code that a model generated: a warm fork server, resource limits and namespaces."""
