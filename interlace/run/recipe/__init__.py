"""Recipes: settings, loading, and the checks before a run starts."""
