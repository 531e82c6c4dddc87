"""The cluster in this process."""
