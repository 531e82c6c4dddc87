"""Protocol of rollout engines: token-in, token-out, with the verbs of serving engines."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args, runtime_checkable

from interlace.core.errors import UserError
from interlace.core.state_parts import KV, WEIGHTS
from interlace.core.types import Completion, Metrics, Request, SampleKey
from interlace.weights.ref import UpdateMode, WeightRef

if TYPE_CHECKING:
    from torch import Tensor

    from interlace.weights.reader import WeightReader
    from interlace.weights.ref import AdapterBase

SwitchMode = Literal["offload", "recompute"]
"""Treatment of the KV cache when the device changes hands: moved to the host and back, or computed again."""


ENGINE_PARTS = (KV, WEIGHTS)
"""Parts of an engine's state, in the order in which they are given up."""


def check_mode(mode: str, *, is_adapter: bool = False) -> None:
    """Raises UserError for what is no UpdateMode, and for one that whole weights do not have."""
    if mode not in get_args(UpdateMode):
        raise UserError(f"unknown weight update mode {mode!r}. Known: {', '.join(get_args(UpdateMode))}.")
    if mode == "own" and not is_adapter:
        raise UserError(
            "weight update mode 'own' holds versions beside each other, which this engine does with adapters that "
            "travel alone: set weights.adapter=alone, or take mode keep or recompute."
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """Output of one engine step."""

    finished: tuple[Completion, ...] = ()
    num_running: int = 0
    num_waiting: int = 0
    num_new_tokens: int = 0
    """Tokens decoded by this step, over all sequences."""
    kv_use: float = 0.0
    """Share of the KV cache that running sequences hold, 0 to 1; 0 where the engine does not say."""
    num_preemptions: int = 0
    """Sequences that gave their KV cells back in this step, to be computed again."""
    drawn: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """All tokens so far of each live request that streams, those it came with included, by its id."""
    refused: Sequence[tuple[Request, str]] = ()
    """Requests that the engine does not serve after all, each with the reason."""
    lost: str = ""
    """Reason why the engine cannot serve any more; empty while it can. Its live requests can be taken out by abort()
    with the tokens that arrived."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineMemory:
    """Bytes on the device."""

    weights: int = 0
    kv_cache: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineReport:
    """Findings of the engine about the loaded model; shown at start."""

    invariant: bool
    """Flag: a sample's bits are independent of what shares its batch."""
    reason: str
    """Why, or why not."""
    attention: str
    """How attention is served, e.g. 'slots, c++ kernel, c++ decoder', or the plain fallback and what forced it."""
    notes: tuple[str, ...] = ()


class RolloutEngine(Protocol):
    """One model instance serving requests. Not thread-safe: one caller at a time."""

    @property
    def version(self) -> int:
        """Returns the version of the weights that the next token will come from."""
        ...

    def submit(self, request: Request) -> None:
        """Queues a request. UserError for an empty prompt or one that cannot fit, ValueError where its id is live."""
        ...

    def step(self) -> StepOutput:
        """Advances all running sequences (one decode step, or as many as the engine's setting says)."""
        ...

    def interrupt(self) -> None:
        """Ends early, from any thread, the step() that runs, or else the next: no further decode step begins."""
        ...

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Completion, ...]:
        """Ends requests (None: all) and returns what they have, finish_reason `aborted`. Unknown ids are ignored."""
        ...

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Notes samples that have ended: what is kept for their next turns (`may_continue`) is needed no more."""
        ...

    def pause(self) -> None:
        """Makes step() do nothing until resume(); running sequences keep their KV cache."""
        ...

    def resume(self) -> None: ...

    def update_weights(
        self, tensors: "Mapping[str, Tensor]", version: int, mode: UpdateMode, *, frozen: bool = False
    ) -> None:
        """Swaps all weights or none: UserError for a missing name or a wrong shape leaves the old ones serving.

        frozen: the tensors are never written to again, so that an engine may serve from them instead of copying them.
        """
        ...

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        """Calls update_weights() with the weights in a Hugging Face folder."""
        ...

    gives_up_parts: bool
    """Flag: KV cache and weights leave the device, and come back, by themselves; else all at once, whatever is asked.
    """

    def onload(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Brings parts of the state back. Weights may be swapped while the KV cache is away; no step is made then."""
        ...

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] = ENGINE_PARTS) -> None:
        """Frees the device; running sequences survive and go on after onload(), their KV cache as `kv` says."""
        ...

    def memory(self) -> EngineMemory: ...

    def metrics(self) -> Metrics:
        """Counters since the last call: tokens/s, preemptions, KV use, time split."""
        ...

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
        """Replaces the adapter, of which the tensors are the factors, or keeps the one before: UserError for other
        layers or another base. adapters: what each trainer rank says of the base."""
        ...


@runtime_checkable
class ServiceEngineProtocol(Protocol):
    """An engine that is a server: it reads new weights itself, and may be lost and return."""

    def pull_weights(self, ref: WeightRef, mode: UpdateMode, reader: "WeightReader") -> None:
        """Brings a version to the server. Raises as update_weights(); a server that is lost keeps its old weights.

        reader: for a version that is not in a folder which the server can read.
        """
        ...

    def recover(self) -> str:
        """Brings a lost server back, with the weights that it had. Returns why that failed, or an empty text."""
        ...

    def health(self) -> str:
        """Returns why the server is lost; empty if it is not."""
        ...

    def close(self) -> None:
        """Ends a server that this process started, and closes the connections."""
        ...
