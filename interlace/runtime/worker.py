"""Workers: plain classes around one resource, whose public methods are operations. Their start and replacement."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import isfunction
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from interlace.core.errors import InterlaceError, RemoteError, UserError, WorkerDiedError, nearest
from interlace.core.payload import PayloadStore, Stored
from interlace.core.recovery import RestartBudget
from interlace.core.state_parts import STATE
from interlace.schedule.placement import Device

if TYPE_CHECKING:
    from interlace.runtime.process.mail import Directory, Mailbox


T = TypeVar("T")
Method = TypeVar("Method", bound=Callable[..., Any])
SplitFunction: TypeAlias = Callable[[tuple[Any, ...], int], Sequence[tuple[Any, ...]]]
"""Splits an operation's arguments into a number of parts. Returns one tuple of arguments per part."""
CollectFunction: TypeAlias = Callable[[Sequence[Any]], Any]
"""Combines the parts' results, in the order of the parts."""
Split: TypeAlias = Literal["broadcast", "samples"] | SplitFunction
Collect: TypeAlias = Literal["first", "all", "concat"] | CollectFunction
Bin = Literal["train", "inference", "score", "simulate", "weight_sync", "switch", "generate", "idle"]
"""Bins of the goodput ledger that operations fill. If operations overlap on a device, the earliest of these counts."""
OPERATION_BINS: tuple[Bin, ...] = get_args(Bin)
_PHASES: dict[Bin | None, str] = {
    "train": "train",
    "score": "reward",
    "simulate": "env",
    "generate": "rollout",
    "weight_sync": "weight_sync",
    "switch": "switch",
}
"""Bin -> default phase of its operations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Declaration of how the runtime calls a method on the ranks of a group."""

    split: Split = "broadcast"
    """broadcast: every rank gets the same arguments. samples: the first argument, a sequence, is distributed to the
    data-parallel ranks by load; ranks that share a model's layers or rows of tokens get the same. Or a user-defined
    function."""
    collect: Collect = "first"
    """first: rank 0's result. all: a list of all ranks' results. concat: the data-parallel ranks' sequences, in the
    argument's order. Or a user-defined function of one result per data-parallel rank."""
    on_device: bool = True
    """True if the runtime takes the group's devices for it (lock, onload, run)."""
    concurrent: bool = False
    """True if it may run while another operation of the same rank runs. It must be thread-safe and return at once."""
    bin: Bin | None = None
    """Bin of the goodput ledger for the time on its devices. None if it uses no devices."""
    parts: tuple[str, ...] | None = None
    """Parts of the worker's state (`memory_parts`) that it needs on the devices. If None, all."""
    makes_activations: bool = True
    """True if it needs the group's working bytes (activations, logits) in addition to the state."""
    phase: str = ""
    """Phase of a step: `timing_s/PHASE` counts the seconds in which it runs. Empty if it belongs to no phase."""


_ATTRIBUTE = "_interlace_operation"


def operation(
    *,
    bin: Bin | None = None,
    phase: str | None = None,
    split: Split = "broadcast",
    collect: Collect = "first",
    on_device: bool = True,
    concurrent: bool = False,
    parts: tuple[str, ...] | None = None,
    makes_activations: bool = True,
) -> Callable[[Method], Method]:
    """Declares a method as an operation: how it is called, and which ledger bin its time fills.

    bin: `idle` for an operation that computes nothing for a step, such as copying a checkpoint.
    phase: None takes the default phase of the bin.
    Raises UserError for an unknown bin, and for an operation on the devices without a bin.
    """
    if bin is None and on_device:
        raise UserError(
            "an operation that holds its devices states which bin of the goodput ledger its time goes to: "
            f"@operation(bin=...), one of {', '.join(OPERATION_BINS)}. One that needs no device: on_device=False."
        )
    if bin is not None and bin not in OPERATION_BINS:
        raise UserError(f"@operation(bin={bin!r}): there is no such bin.{nearest(bin, OPERATION_BINS)}")
    phase = _PHASES.get(bin, "") if phase is None else phase
    how = Operation(
        split=split,
        collect=collect,
        on_device=on_device,
        concurrent=concurrent,
        bin=bin,
        parts=parts,
        makes_activations=makes_activations,
        phase=phase,
    )

    def mark(method: Method) -> Method:
        setattr(method, _ATTRIBUTE, how)
        return method

    return mark


def operation_of(worker_class: type, name: str) -> Operation | None:
    """Returns the declaration of a method or of the method that it overrides. Returns None if there is none."""
    for cls in worker_class.__mro__ if callable(getattr(worker_class, name, None)) else ():
        declared: Operation | None = getattr(vars(cls).get(name), _ATTRIBUTE, None)
        if declared is not None:
            return declared
    return None


RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions of an operation that are raised again at its caller. An operation that exits must not end its thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Meeting point of a group's ranks for torch.distributed: `init_process_group(init_method=place.url, ...)`."""

    url: str
    """`file://PATH` in a private folder of the user if all ranks are on one machine. Otherwise `tcp://HOST:PORT`: the
    address of rank 0's node, and a port that was free when the group was started."""
    secret: str = ""
    """Prefix of the names in the store. Without it, no entry can be read or replaced."""


PATIENCE_S = 60.0
"""Seconds that a rank waits for another's message, or for its mailbox."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """Identity, devices and peers of a rank, for the worker's use."""

    group: str
    rank: int
    num_ranks: int
    devices: tuple[str, ...]
    """Names of the devices it may compute on, e.g. ('cuda:0',). Empty for a worker that needs none."""
    rendezvous: Rendezvous | None = None
    """Meeting point of a group of several processes. None if ranks are threads, or if there is one rank."""
    directory: "Directory | None" = None
    """Directory in which ranks find each other's mailboxes. None on a virtual clock."""

    @property
    def name(self) -> str:
        """Name of the rank for other ranks: GROUP.NUMBER, such as `camera.0`."""
        return f"{self.group}.{self.rank}"

    def send(self, to: str, value: object, *, tag: str = "", patience_s: float = PATIENCE_S) -> None:
        """Sends a picklable value, such as arrays or tensors, directly to another rank. to: the rank's name.

        Tensors arrive on the host. Within a process the value is passed on without a copy. Raises InterlaceError if the
        other rank does not exist.
        """
        self._mailbox().send(to, value, tag, patience_s)

    def recv(self, source: str, *, tag: str = "", patience_s: float = PATIENCE_S) -> Any:
        """Returns the next value that a rank sent with this tag. Raises InterlaceError if none arrives in time."""
        return self._mailbox().recv(source, tag, patience_s)

    def keep(self, value: T) -> "Stored[T]":
        """Returns a reference to a value that stays here, as the result of an operation. Do not modify the value.

        The flow passes the reference to operations of other ranks, which read the value where it is. It is freed with
        the flow's last reference. Within one process a reference is the value. A value of less than 8 KiB, or for a
        rank on another machine, travels in the message.
        """
        from interlace.runtime.process.frames import plain_dumps

        store = self.open_payload_store()
        return (store.put(value, plain_dumps) if store else None) or Stored(value)

    def open_payload_store(self) -> PayloadStore | None:
        """Returns the store of values that stay on this machine.

        None if the rank is in the run's process, or if no store reaches the other ranks.
        """
        directory = self.directory
        if directory is None or directory.process == os.getpid():
            return None
        if directory.shared is None or not directory.shared.is_dir():
            return directory.open_remote_store()
        return PayloadStore(directory.shared)

    def _mailbox(self) -> "Mailbox":
        from interlace.runtime.process.mail import mailbox_of

        if self.directory is None:
            raise UserError(f"{self.name} is on a virtual clock, and ranks cannot exchange messages there.")
        return mailbox_of(self.directory, self.name)


class Tracer(Protocol):
    """A recording of all threads' computation in one process. It begins when the tracer is made."""

    def stop(self) -> bytes:
        """Ends the recording and returns it."""


class Worker:
    """Base of all workers. A worker is made on the rank's thread or process; its operations run there one at a time.

    An operation that is a coroutine function runs on the event loop instead; those that need no device overlap.
    """

    def __init_subclass__(cls) -> None:
        """Raises UserError for a public method without a declaration, because its time would not be counted."""
        super().__init_subclass__()
        for name, member in vars(cls).items():
            if name.startswith("_") or not isfunction(member) or hasattr(Worker, name):
                continue
            if operation_of(cls, name) is None:
                raise UserError(
                    f"{cls.__name__}.{name}: a public method of a worker is an operation and must be declared. Write "
                    "@operation(bin=...) before it, or @operation(on_device=False) if it needs no device, or "
                    "begin its name with an underscore."
                )

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._tracer: Tracer | None = None

    @operation(bin="switch")
    def onload(self) -> "Awaitable[None] | None":
        """Loads the worker's state onto its devices. Called by the runtime, never by flow code."""

    @operation(bin="switch")
    def offload(self) -> "Awaitable[None] | None":
        """Moves the state off the devices without losing any of it."""

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        """Returns the bytes that the loaded state needs on each device."""
        return 0

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        """Returns the bytes of each part of the state that is loaded separately, in the order of unloading.

        If a worker has several parts, its onload() and offload() take `parts`, the names of the parts to move. If None,
        all.
        """
        return {STATE: self.memory_bytes()}

    @operation(on_device=False)
    async def start_trace(self, make: Callable[[], Tracer]) -> None:
        """Starts recording the worker's process, alongside running operations."""
        self._tracer = await asyncio.to_thread(make)

    @operation(on_device=False)
    async def stop_trace(self) -> bytes:
        """Ends the recording and returns it."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            raise InterlaceError(f"{self.context.group}: stop_trace() without start_trace().")
        return await asyncio.to_thread(tracer.stop)

    def close(self) -> None:
        """Releases the worker's resources (processes, files). Called once, after its last operation, in every case."""


NOTICED_S = 0.5
"""Seconds in which the death of a rank is noticed after its peers have failed because of it."""


class RankHolder(Protocol):
    """A group whose ranks can be replaced."""

    ranks: Sequence[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class RevivalRule:
    """Rule for a group whose ranks are replaced if one of them dies."""

    budget: RestartBudget
    """Budget of the replacements."""
    repeats_calls: bool
    """True if interrupted calls are made again, because the worker keeps nothing between two calls. False if the holder
    of the group handles WorkerDiedError and then calls revive()."""


Restore: TypeAlias = Callable[[Sequence[Any]], Awaitable[object]]
"""Restores the state of new ranks."""


@dataclass(kw_only=True, slots=True)
class Revival:
    """Replacement of the ranks of one group."""

    make_ranks: Callable[[str, Restore | None], Awaitable[Sequence[Any]]]
    """Starts ranks in place of the group's, and restores their state. The arguments are the reason and `restore`.
    Raises RestartBudgetError and the errors of a start."""
    find_death: Callable[[float], Awaitable[WorkerDiedError | None]]
    """Returns the death of a rank of the group. Returns None if all ranks run. The argument is the number of seconds
    to wait for a death that is not noticed yet."""
    repeats_calls: bool
    restore: Restore | None = None
    """Restores the state of new ranks before any call reaches them. If None, they need no state but that of a start."""
    turn: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held during a replacement, so that several interrupted calls cause one."""

    async def run(self, group: RankHolder, call: Callable[[], Awaitable[Any]], on_repeat: Callable[[], None]) -> Any:
        """Makes a call. After the death of a rank, replaces the ranks and makes the call again if the rule allows it.

        on_repeat: is called before each repetition. Raises WorkerDiedError, RemoteError and the errors of make_ranks.
        """
        while True:
            ranks = group.ranks
            try:
                return await call()
            except (WorkerDiedError, RemoteError) as error:  # the peers of a rank that died may fail first
                await self._replace_ranks(group, ranks, error)
                on_repeat()

    async def _replace_ranks(
        self, group: RankHolder, ranks: Sequence[Any], error: WorkerDiedError | RemoteError
    ) -> None:
        """Replaces ranks after an error, unless another call has done so. Raises the error if it is not by a death."""
        async with self.turn:  # the dead ranks are no longer found while another call replaces them
            may_follow = isinstance(error, RemoteError) and len(ranks) > 1
            death = await self.find_death(NOTICED_S if may_follow else 0.0)
            if not self.repeats_calls or (not death and group.ranks is ranks):
                raise (death or error) from error
            if group.ranks is ranks:
                group.ranks = tuple(await self.make_ranks(str(death), self.restore))


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
