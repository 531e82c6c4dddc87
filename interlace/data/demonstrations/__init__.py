"""Writers of example responses for warm-up, one file each, found by name."""
