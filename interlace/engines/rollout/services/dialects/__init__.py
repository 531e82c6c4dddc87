"""Dialects of engine services by name, one file each: the APIs of the kinds of servers."""

from collections.abc import Sequence
from typing import Protocol, cast

from interlace.core.plugins import builtin_module, builtin_names
from interlace.engines.rollout.services.protocol import Address, EngineClient


class DialectModule(Protocol):
    """Interface of each module of this folder."""

    def connect(self, address: Address, *, seed: int, own_stops: Sequence[int] = ()) -> EngineClient:
        """Opens a client on the running event loop. seed: of the sampling noise. own_stops: end tokens of the model."""


def dialect_names() -> list[str]:
    """Lists the dialects, sorted."""
    import interlace.engines.rollout.services.dialects as package

    return builtin_names(package)


def dialect_named(name: str) -> DialectModule:
    """Finds a dialect by name. Raises UserError for an unknown one."""
    import interlace.engines.rollout.services.dialects as package

    return cast("DialectModule", builtin_module("dialect of an engine service", package, name))
