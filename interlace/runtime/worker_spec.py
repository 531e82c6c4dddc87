"""Specification of the workers of a group, from which a cluster starts them."""

from collections.abc import Callable
from dataclasses import dataclass

from interlace.runtime.revival import RevivalRule
from interlace.runtime.worker import Worker, WorkerContext
from interlace.schedule.placement import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerSpec:
    """Specification of the ranks of a group."""

    name: str
    """`role` or `role/instance`."""
    factory: Callable[[WorkerContext], Worker]
    """Function that makes the worker on each rank. For a cluster of processes, it and its closure must be picklable."""
    worker_class: type[Worker]
    devices: tuple[Device, ...] = ()
    num_ranks: int = 1
    copies: int = 1
    """Number of neighbouring ranks that get the same samples, because they share a model's layers or rows of tokens."""
    used_devices: int | None = None
    """Number of devices that each rank computes on, counted from the first. If None, all. The ledger counts no others
    for its work."""
    working_bytes: int = 0
    """Bytes that an operation needs on each device in addition to the state: activations, logits, gathered layers."""
    preload: tuple[str, ...] = ()
    """Modules that ranks with a separate process need. On `local`, a server imports them once for all ranks."""
    stage: int = 0
    """Position in the flow, counted from upstream. If several groups wait for a device, the largest number is first."""
    preemptible: bool = False
    """True if the group releases its devices early when a group of a later stage waits for them."""
    revival: RevivalRule | None = None
    """Rule by which ranks with a separate process are replaced after a death. If None, a death ends the run."""
    may_die: bool = False
    """True if the run continues when a rank's process dies. The rank then has a separate process. Its calls raise
    WorkerDiedError, and values that it kept (`WorkerContext.keep`) stay readable."""
