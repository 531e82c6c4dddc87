"""Names of the parts of a worker's state that are moved to and from its devices independently."""

GRADIENTS, OPTIMIZER, KV, WEIGHTS = "gradients", "optimizer", "kv_cache", "weights"
STATE = "state"
"""Name of the whole state of a worker that has no parts."""


def peak_bytes(state: int, moments: int, working: int) -> int:
    """Returns the memory that a worker needs on a device, in bytes: its whole state, or its peak during computation.

    moments: bytes of the state that only an update needs, and that can be offloaded to the host. working: bytes that a
    computation needs in addition to the state.
    """
    return max(state, state - moments + working)
