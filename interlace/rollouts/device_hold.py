"""Devices of a rollout engine between two requests of other roles: how long the engine holds them."""

import asyncio
from collections.abc import Callable, Sequence

from interlace.core.state_parts import WEIGHTS
from interlace.runtime.clock import Clock
from interlace.schedule.schedule import Schedule

ROUNDING_S = 1e-6
"""Rounding tolerance of clocks, in seconds."""


class DeviceHold:
    """Decides when an engine yields its devices: after `min_hold`, if another role requests them.

    The runtime calls it as the driver of the worker group (`interlace.runtime.group_state.Driver`).
    """

    def __init__(
        self, schedule: Schedule, clock: Clock, *, on_recompute: Callable[[], None], wake: Callable[[], None]
    ) -> None:
        """on_recompute: called when the engine will recompute the KV cache of its running sequences.

        wake: called when the engine must look at the hold, during a call too.
        """
        self._clock, self._on_recompute, self._wake = clock, on_recompute, wake
        self._min_hold = schedule.min_hold
        self._drops_cache = schedule.kv_on_switch == "recompute"
        self._since_s = 0.0
        """Time at which the engine got its devices."""
        self.is_requested = False
        """True from the request of another role until the engine gets its devices again."""

    @property
    def is_over(self) -> bool:
        """True if the engine must yield its devices now."""
        return self.is_requested and self._clock.now() - self._since_s >= self._min_hold - ROUNDING_S

    def begin(self) -> None:
        """Records that the engine got its devices."""
        self.is_requested, self._since_s = False, self._clock.now()

    def ask_to_yield(self) -> None:
        """Requests the devices. The engine yields them after `min_hold`."""
        self.is_requested = True
        left = self._since_s + self._min_hold - self._clock.now()
        if left > ROUNDING_S:
            asyncio.get_running_loop().call_later(left, self._wake)
        else:
            self._wake()

    @property
    def unload_arguments(self) -> tuple[str, ...]:
        """Arguments for the engine's offload()."""
        return ("recompute",) if self._drops_cache else ()

    def unloaded(self, parts: Sequence[str]) -> None:
        """Records that parts of the engine's state were offloaded from the devices."""
        if self._drops_cache and tuple(parts) != (WEIGHTS,):
            self._on_recompute()
