"""Cost models that replace the workers on the virtual clock."""
