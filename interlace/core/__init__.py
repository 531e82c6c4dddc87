"""Shared types, configuration and errors. Imports no other folder of the package, and neither torch nor ray."""
