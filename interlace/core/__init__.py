"""The shared vocabulary: types, configuration, errors. Imports nothing of interlace above it, and neither torch nor ray."""
