"""The runtime on a virtual clock."""
