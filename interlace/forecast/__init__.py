"""Forecast of the time and memory of a run: cost models, profiles, and the search for a schedule."""
