"""Ways to write weights down, one file each; base.py says what a codec has to have."""
