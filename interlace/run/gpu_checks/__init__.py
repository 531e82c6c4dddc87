"""Checks that need a GPU: `interlace doctor --gpu` runs them and prints one table."""
