"""Names of the parts of a worker's state that come onto its devices and go by themselves."""

GRADIENTS, OPTIMIZER, KV, WEIGHTS = "gradients", "optimizer", "kv_cache", "weights"
STATE = "state"
"""The one part of a worker that has no parts."""


def peak_bytes(state: int, moments: int, working: int) -> int:
    """Returns the bytes that a device must have for a worker: all of its state, or what is there while it computes.

    moments: the part of the state that an update alone needs, and that goes to the host where it has to. working: what
    computing takes beside the state.
    """
    return max(state, state - moments + working)
