"""Names of the parts of a worker's state that come onto its devices and go by themselves."""

GRADIENTS, OPTIMIZER, KV, WEIGHTS = "gradients", "optimizer", "kv_cache", "weights"
STATE = "state"
"""The one part of a worker that has no parts."""
