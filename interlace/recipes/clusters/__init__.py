"""Back ends that a recipe can name, one file each: which devices they have."""
