"""Workers: plain classes around one thing, whose operations are their public methods."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isfunction
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, TypeVar, get_args

from interlace.core.errors import InterlaceError, UserError, nearest
from interlace.core.state_parts import STATE

if TYPE_CHECKING:
    from interlace.runtime.process.exchange import ChannelEnd
    from interlace.runtime.process.mail import Directory, Mailbox

Method = TypeVar("Method", bound=Callable[..., Any])
SplitFunction: TypeAlias = Callable[[tuple[Any, ...], int], Sequence[tuple[Any, ...]]]
"""Deals an operation's arguments to a number of parts: one tuple of arguments each."""
CollectFunction: TypeAlias = Callable[[Sequence[Any]], Any]
"""Puts the parts' results together, in the order of the parts."""
Split: TypeAlias = Literal["broadcast", "samples"] | SplitFunction
Collect: TypeAlias = Literal["first", "all", "concat"] | CollectFunction
Bin = Literal["train", "inference", "score", "simulate", "weight_sync", "switch", "generate", "idle"]
"""Bins of the goodput ledger that operations fill. Where operations overlap on a device, the first of these counts."""
OPERATION_BINS: tuple[Bin, ...] = get_args(Bin)
_PHASES: dict[Bin | None, str] = {
    "train": "train",
    "score": "reward",
    "simulate": "env",
    "generate": "rollout",
    "weight_sync": "weight_sync",
    "switch": "switch",
}
"""Bin -> phase of a step that its operations are in, if they do not say otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Operation:
    """Way in which the runtime calls a method on the ranks of a group."""

    split: Split = "broadcast"
    """broadcast: every rank gets the same. samples: the first argument, a sequence, is dealt to the data-parallel ranks
    by load; ranks that share a model's layers or rows of tokens get the same. Or a function of your own."""
    collect: Collect = "first"
    """first: rank 0's result. all: a list, one a rank. concat: the data-parallel ranks' sequences, back in the
    argument's order. Or a function of your own, of one result a data-parallel rank."""
    on_device: bool = True
    """The runtime takes the group's devices for it (lock, onload, run)."""
    concurrent: bool = False
    """May run while another operation of the same rank runs; must be thread-safe and return at once."""
    bin: Bin | None = None
    """Bin of the goodput ledger for the time in which it runs on its devices; None where it takes none."""
    parts: tuple[str, ...] | None = None
    """Parts of the worker's state (`memory_parts`) that it needs on the devices; None: all."""
    makes_activations: bool = True
    """Flag: it needs the group's working bytes (activations, logits) beside the state."""
    phase: str = ""
    """Phase of a step: `timing_s/PHASE` counts the seconds in which it runs. Empty for an operation of no phase."""


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
    """Declares a method as an operation: how it is called, and where its time is booked.

    bin: `idle` for an operation that computes nothing of a step, such as copying a checkpoint.
    phase: None takes the usual one of the bin.
    Raises UserError for an unknown bin, and for an operation on the devices without one.
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
    """Finds a method's declaration: its own, or that of the method it overrides. None where there is none."""
    for cls in worker_class.__mro__ if callable(getattr(worker_class, name, None)) else ():
        declared: Operation | None = getattr(vars(cls).get(name), _ATTRIBUTE, None)
        if declared is not None:
            return declared
    return None


RAISED = (Exception, SystemExit, asyncio.CancelledError)
"""Exceptions of an operation that are raised again at its caller. An operation that exits must not end its thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """Meeting place of a group's ranks for torch.distributed: `init_process_group(init_method=place.url, ...)`."""

    url: str
    """`file://PATH` in a folder of the user's own, where all ranks are on one machine; else `tcp://HOST:PORT`, the
    address of rank 0's node and a port that was free there when the group was started."""
    secret: str = ""
    """Prefix of the names in the store: without it nothing there can be read or replaced."""


PATIENCE_S = 60.0
"""Seconds that a rank waits for another's message, or for its mailbox."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WorkerContext:
    """Place of a rank, as the rank itself sees it."""

    group: str
    rank: int
    num_ranks: int
    devices: tuple[str, ...]
    """Names of the devices it may compute on, e.g. ('cuda:0',); empty for a worker that needs none."""
    rendezvous: Rendezvous | None = None
    """Meeting place of a group of several processes; None where ranks are threads, or alone."""
    directory: "Directory | None" = None
    """Book in which ranks find each other's mailboxes; None where there is no content to send."""

    @property
    def name(self) -> str:
        """Returns the rank's name for others: GROUP.NUMBER, such as `camera.0`."""
        return f"{self.group}.{self.rank}"

    def send(self, to: str, value: object, *, tag: str = "", patience_s: float = PATIENCE_S) -> None:
        """Sends arrays, tensors, or whatever can be pickled to another rank, past the controller. to: its name.

        Tensors arrive on the host. Within a process a value is handed over, not copied. Raises InterlaceError where the
        other rank is not there.
        """
        self._mailbox().send(to, value, tag, patience_s)

    def recv(self, source: str, *, tag: str = "", patience_s: float = PATIENCE_S) -> Any:
        """Returns the next value that a rank sent with this tag. Raises InterlaceError where none comes in time."""
        return self._mailbox().recv(source, tag, patience_s)

    def channel(self, name: str, *, patience_s: float = PATIENCE_S) -> "ChannelEnd":
        """Returns this rank's end of a channel that the flow has opened (`cluster.open_channel`)."""
        from interlace.runtime.process.exchange import ChannelEnd

        return ChannelEnd(name, self._mailbox(), patience_s)

    def _mailbox(self) -> "Mailbox":
        from interlace.runtime.process.mail import mailbox_of

        if self.directory is None:
            raise UserError(f"{self.name} is on a virtual clock, where nothing is sent from rank to rank.")
        return mailbox_of(self.directory, self.name)


class Tracer(Protocol):
    """A recording of what one process computes, on all its threads, that began when this was made."""

    def stop(self) -> bytes:
        """Ends the recording and returns it."""
        ...


class Worker:
    """Base of all workers. Constructed on the rank's own thread or process; operations run there one at a time.

    An operation that is a coroutine function runs on the event loop instead; those that need no device overlap.
    """

    def __init_subclass__(cls) -> None:
        """Raises UserError for a public method that is not declared: its time would be booked nowhere."""
        super().__init_subclass__()
        for name, member in vars(cls).items():
            if name.startswith("_") or not isfunction(member) or hasattr(Worker, name):
                continue
            if operation_of(cls, name) is None:
                raise UserError(
                    f"{cls.__name__}.{name}: a public method of a worker is an operation, and says so. Write "
                    "@operation(bin=...) before it, or @operation(on_device=False) where it needs no device, or "
                    "begin its name with an underscore."
                )

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self._tracer: Tracer | None = None

    @operation(bin="switch")
    def onload(self) -> "Awaitable[None] | None":
        """Brings the worker's state onto its devices. Called by the runtime, never by flow code."""

    @operation(bin="switch")
    def offload(self) -> "Awaitable[None] | None":
        """Moves it off again, without losing any."""

    @operation(on_device=False)
    def memory_bytes(self) -> int:
        """Returns the bytes that the loaded state needs on each device."""
        return 0

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        """Returns the bytes of each part of the state that comes and goes by itself, in the order of giving them up.

        onload() and offload() of a worker with several parts take `parts`, those to move; None: all.
        """
        return {STATE: self.memory_bytes()}

    @operation(on_device=False)
    async def start_trace(self, make: Callable[[], Tracer]) -> None:
        """Starts recording the worker's process, beside what runs there."""
        self._tracer = await asyncio.to_thread(make)

    @operation(on_device=False)
    async def stop_trace(self) -> bytes:
        """Ends the recording and returns it."""
        tracer, self._tracer = self._tracer, None
        if tracer is None:
            raise InterlaceError(f"{self.context.group}: stop_trace() without start_trace().")
        return await asyncio.to_thread(tracer.stop)

    def close(self) -> None:
        """Ends what the worker started (processes, files). Called once, after its last operation, whatever ended it."""
