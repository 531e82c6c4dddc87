"""Use of one engine during a call, from which a limit on its sequences adapts."""

from typing import NamedTuple


class EngineUse(NamedTuple):
    """Report of an engine at the end of a call. A tuple, because every call makes one."""

    num_here: int
    """Sequences in the engine, running or waiting."""
    num_waiting: int
    """Sequences among them that wait, because the engine has an internal limit."""
    num_finished: int
    """Sequences that ended in the call."""
    kv_use: float
    """Largest share of the KV cache that running sequences held, 0 ... 1; 0 if the engine does not report it."""
    num_preemptions: int
    """Sequences that lost their KV-cache cells in the call."""
    is_binding: bool
    """True if more sequences are ready than the limit admits."""
    num_tokens: int = 0
    """Tokens of the sequences in the engine."""
    num_ended_tokens: int = 0
    """Tokens of the sequences that ended in the call."""
