"""Code that a model wrote, run apart from the run: a warm fork server, limits, namespaces and write rules.

What the kernel of a machine grants is probed at start and reported; nothing is taken for granted.
"""
