"""Ways for weights to travel, one file each; base.py says what a transport has to have."""
