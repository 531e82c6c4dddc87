"""Runs of a recipe: build, train, evaluate, save, resume."""
