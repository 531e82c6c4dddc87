"""The shared vocabulary: types, configuration, errors. Imports nothing above it, and neither torch nor ray."""
