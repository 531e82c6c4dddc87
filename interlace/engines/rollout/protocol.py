"""Protocol of rollout engines: token-in, token-out, with the usual operations of serving engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

from interlace.core.errors import UserError
from interlace.core.state_parts import KV, WEIGHTS
from interlace.core.types import Metrics, Request, Response, SampleKey
from interlace.weights.ref import AdapterBase, Place, UpdateMode, WeightRef

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.weights.reader import WeightReader

SwitchMode = Literal["offload", "recompute"]
"""Treatment of the KV cache when the device changes hands: moved to the host and back, or computed again."""


ENGINE_PARTS = (KV, WEIGHTS)
"""Parts of an engine's state, in the order in which they leave the device."""


def check_mode(mode: str, *, is_adapter: bool = False) -> None:
    """Raises UserError if the mode is unknown, or is `own` for an update of whole weights."""
    if mode not in get_args(UpdateMode):
        raise UserError(f"unknown weight update mode {mode!r}. Known: {', '.join(get_args(UpdateMode))}.")
    if mode == "own" and not is_adapter:
        raise UserError(
            "weight update mode 'own' keeps several versions, which this engine supports only for adapters that "
            "travel alone: set weights.adapter=alone, or take mode keep or recompute."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Output of one engine step."""

    finished: tuple[Response, ...] = ()
    """Responses to the requests that ended in this step. A request that the engine does not serve has a `failure`."""
    num_running: int = 0
    num_waiting: int = 0
    num_new_tokens: int = 0
    """Tokens decoded by this step, over all sequences."""
    kv_use: float = 0.0
    """Share of the KV cache that running sequences hold, between 0 and 1; 0 if the engine does not report it."""
    num_preemptions: int = 0
    """Sequences whose KV cells were freed in this step and must be computed again."""
    drawn: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Request id -> all tokens so far of a live request that streams, including those it was submitted with."""
    lost: str = ""
    """Reason why the engine can no longer serve; empty while it can. abort() then returns its live requests with the
    received tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on the device."""

    weights: int = 0
    kv_cache: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Findings of the engine about the loaded model, shown at the start."""

    invariant: bool
    """True if a sample's bits do not depend on the other samples of its batch."""
    reason: str
    """Reason for the value of `invariant`."""
    attention: str
    """Implementation of attention, e.g. 'slots, c++ kernel, c++ decoder', or the plain fallback and its reason."""
    notes: tuple[str, ...] = ()


class RolloutEngine(Protocol):
    """One model instance that serves requests. Not thread-safe: one caller at a time."""

    @property
    def version(self) -> int:
        """Returns the version of the weights that will sample the next token."""

    def submit(self, request: Request) -> None:
        """Queues a request. Raises UserError if its prompt is empty or it cannot fit, ValueError if its id is live."""

    def step(self) -> StepOutput:
        """Advances all running sequences by one decode step, or by several if the engine is configured so."""

    def interrupt(self) -> None:
        """Ends the current or else the next step() early: no further decode step begins. Callable from any thread."""

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Response, ...]:
        """Ends requests (None: all) and returns their tokens so far, finish_reason `aborted`. Ignores unknown ids."""

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Records that samples have ended: cells kept for their next turns (`may_continue`) are no longer needed."""

    def pause(self) -> None:
        """Makes step() do nothing until resume(); running sequences keep their KV cache."""

    def resume(self) -> None: ...

    def update_weights(
        self, tensors: "Mapping[str, Tensor]", version: int, mode: UpdateMode, *, frozen: bool = False
    ) -> None:
        """Replaces all weights or none. Raises UserError for a missing name or wrong shape; the old weights then keep
        serving.

        frozen: the tensors are never written again, so an engine may serve from them instead of copying them.
        """

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        """Calls update_weights() with the weights in a Hugging Face folder."""

    gives_up_parts: bool
    """True if KV cache and weights can leave the device separately; otherwise both move at once, regardless of `parts`.
    """

    def onload(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Moves parts of the state back. Weights may be replaced while the KV cache is away; no step runs then."""

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Frees the device. Running sequences continue after onload(); `kv` sets the treatment of their KV cache."""

    def memory(self) -> EngineMemory: ...

    def metrics(self) -> Metrics:
        """Returns counters since the last call: tokens/s, preemptions, KV use, time split."""

    def report(self) -> EngineReport: ...


class TakesAdapters(Protocol):
    """An engine that adds an adapter to the weights that it loaded (`weights.adapter=alone`)."""

    def update_weights(
        self,
        tensors: "Mapping[str, Tensor]",
        version: int,
        mode: UpdateMode,
        *,
        adapters: "Sequence[AdapterBase]",
    ) -> None:
        """Replaces the adapter. Raises UserError, and keeps the previous one, for other layers or another base.

        tensors: the factors of the adapter. adapters: description of the base by each trainer rank.
        """


@runtime_checkable
class ServiceEngineProtocol(Protocol):
    """An engine that is a server: it reads new weights itself, and may be lost and return."""

    def pull_weights(self, ref: WeightRef, mode: UpdateMode, reader: "WeightReader") -> None:
        """Transfers a version to the server. Raises the errors of update_weights(); a lost server keeps its old
        weights.

        reader: for a version outside the folders that the server can read.
        """

    def recover(self) -> str:
        """Restores a lost server, with its previous weights. Returns the reason of a failure, or an empty text."""

    def health(self) -> str:
        """Returns the reason why the server is lost; empty if it is not."""

    def weight_place(self) -> Place:
        """Returns the place of the process that reads new weights: of the server, or of this process."""

    def close(self) -> None:
        """Ends a server that this process started, and closes the connections."""
