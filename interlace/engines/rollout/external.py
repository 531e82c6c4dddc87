"""Shared parts of the adapters of serving engines: records of live requests, and the common operations."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor

from interlace.core.errors import InterlaceError, UserError
from interlace.core.random import stable_hash
from interlace.core.types import FinishReason, Metrics, Request, Response, SampleKey
from interlace.engines.rollout.named_weights import GivenWeights, NamedWeights
from interlace.engines.rollout.protocol import (
    ENGINE_PARTS,
    EngineMemory,
    EngineReport,
    StepOutput,
    SwitchMode,
    check_mode,
)
from interlace.engines.rollout.stop_strings import find_resumed_stop
from interlace.weights.ref import UpdateMode
from interlace.weights.saved import SavedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Generated: TypeAlias = tuple[str, Sequence[int], Sequence[float], FinishReason | None]
"""Id of a request, its new tokens, their log-probs, and the reason of its end; None if it continues."""
NO_LOGPROB = -9999.0
"""Value that serving engines return for a missing log-prob or one of minus infinity."""


@dataclass(slots=True, eq=False)
class _Progress:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class LiveRequests:
    """Requests in progress at a serving engine, with the tokens received so far."""

    def __init__(self) -> None:
        self._live: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def named(self, ids: Sequence[str] | None) -> list[str]:
        """Returns the ids that are live, each once; if None, all live ids in order of submission."""
        return list(self._live) if ids is None else [name for name in dict.fromkeys(ids) if name in self._live]

    def rows(self) -> list[tuple[str, Request, tuple[int, ...]]]:
        """Lists each live request: its id, the request and all its tokens, including those before a resumption."""
        return [(name, one.request, tuple(one.token_ids)) for name, one in self._live.items()]

    def add(self, request: Request) -> None:
        """Adds a request. Raises ValueError if its id is live.

        Raises UserError for an empty prompt, and for arrays, parallel decoding and raw log-probs, which need the native
        engine.
        """
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already live")
        if not len(request.prompt_ids):
            raise UserError(f"request {request.id}: the prompt is empty. Give it at least one token (a BOS will do).")
        if request.inputs is not None or request.query_ids:
            raise UserError(
                f"request {request.id}: arrays beside tokens and parallel decoding are the native engine's alone. Set "
                "rollout.engine=native."
            )
        if request.params.raw_logprobs:
            raise UserError(f"request {request.id}: raw_logprobs come from the native engine alone. Leave them off.")
        self._live[request.id] = _Progress(
            request,
            list(request.generated_ids),
            list(request.generated_logprobs),
            list(request.generated_versions),
        )

    def drawn(self) -> dict[str, Sequence[int]]:
        """Returns the tokens of each live request that streams, including those before a resumption."""
        return {name: tuple(one.token_ids) for name, one in self._live.items() if one.request.streams}

    def num_sent(self, name: str) -> int:
        """Counts the tokens received since the request was submitted."""
        progress = self._live[name]
        return len(progress.token_ids) - len(progress.request.generated_ids)

    def extend(self, name: str, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Adds received tokens. Raises InterlaceError for an invalid log-prob."""
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if not NO_LOGPROB < logprob < math.inf:  # False for NaN too.
                raise InterlaceError(
                    f"request {name}: the engine gave {logprob} as the log-prob of token {token} that it sampled, which"
                    " is its mark of a missing one. Training on it would silently go wrong."
                )
        progress = self._live[name]
        progress.token_ids += token_ids
        progress.logprobs += logprobs
        progress.versions += [version] * len(token_ids)

    def set_versions(self, name: str, versions: Sequence[int]) -> None:
        """Corrects the versions of the last received tokens. Raises InterlaceError if there are fewer tokens."""
        if len(versions) > self.num_sent(name):
            raise InterlaceError(
                f"request {name}: the engine reported versions of {len(versions)} tokens, and sent fewer."
            )
        if versions:
            self._live[name].versions[-len(versions) :] = versions

    def cut_at_stop(self, name: str, num_new: int, tokenizer: "PreTrainedTokenizerBase | None") -> bool:
        """Removes the tokens after a stop string that began before the request was resumed. Returns whether it has one.

        num_new: number of the last tokens, which were not searched yet. tokenizer: if None, nothing is searched.
        """
        if tokenizer is None:
            return False
        progress = self._live[name]
        end = find_resumed_stop(progress.request, progress.token_ids, num_new, tokenizer)
        if end is None:
            return False
        for column in (progress.token_ids, progress.logprobs, progress.versions):
            del column[end:]
        return True

    def end(self, name: str, reason: FinishReason, num_cached_tokens: int = 0) -> Response:
        progress = self._live.pop(name)
        return Response(
            request=progress.request,
            token_ids=tuple(progress.token_ids),
            logprobs=tuple(progress.logprobs),
            versions=tuple(progress.versions),
            finish_reason=reason,
            num_cached_tokens=num_cached_tokens,
        )


class EngineBackend(ABC):
    """An engine that receives requests and returns tokens. `ExternalEngine` adds the rest of the rollout protocol.

    A subclass defines how the next tokens are received and how weights are replaced. If requests must be sent to
    another process, it also defines how.
    """

    name: str
    """Name of the engine in a report."""
    reason: str = "this engine's bits may depend on what shares a batch"
    """Reason why samples depend on the other requests of their batch."""
    notes: tuple[str, ...] = ()
    """Remarks that a report adds."""

    @abstractmethod
    def advance(self, live: LiveRequests) -> Iterable[Generated]:
        """Yields the tokens received for live requests since the last call; waits for at least one."""

    @abstractmethod
    def swap(self, weights: NamedWeights) -> None:
        """Replaces all weights, or raises UserError and replaces none if they do not fit. Called between two steps."""

    def send(self, request: Request) -> None:  # noqa: B027 - an engine that reads the live requests needs none
        """Sends a request to the engine. Raises UserError for one that cannot be served."""

    def drop(self, names: Sequence[str]) -> None:  # noqa: B027 - likewise
        """Ends live requests; advance() yields nothing more for them."""

    def sleep(self, parts: Sequence[str]) -> None:  # noqa: B027 - optional: some engines free nothing
        """Frees parts of the state, or all of it if they cannot leave separately; no request is live."""

    def wake(self, parts: Sequence[str]) -> None:  # noqa: B027 - likewise
        """Undoes sleep(), weights first."""


class ExternalEngine:
    """Rollout protocol over a backend: requests, versions, abort, pause, resumption and offload."""

    gives_up_parts = False

    def __init__(self, backend: EngineBackend) -> None:
        self._backend, self._live, self.version = backend, LiveRequests(), 0
        self._paused = False
        self._away: set[str] = set()
        """Parts of the state that are off the device."""

    def submit(self, request: Request) -> None:
        self._live.add(request)
        try:
            self._backend.send(request)
        except BaseException:  # A refused request, such as one with a prompt that is too long, gets no answer.
            self._live.end(request.id, FinishReason.ABORTED)
            raise

    def step(self) -> StepOutput:
        finished: list[Response] = []
        new_tokens = 0
        if len(self._live) and not self._paused and not self._away:
            for name, token_ids, logprobs, ended in self._backend.advance(self._live):
                self._live.extend(name, token_ids, logprobs, self.version)
                new_tokens += len(token_ids)
                if ended is not None:
                    finished.append(self._live.end(name, ended))
        return StepOutput(
            finished=tuple(finished),
            num_running=len(self._live),
            num_new_tokens=new_tokens,
            drawn=self._live.drawn(),
        )

    def interrupt(self) -> None:
        """Does nothing: a step is one forward pass."""

    def release(self, owners: Sequence[SampleKey]) -> None:
        """Does nothing: no cache is kept between requests."""

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Response, ...]:
        wanted = self._live.named(ids)
        self._backend.drop(wanted)
        return tuple(self._live.end(name, FinishReason.ABORTED) for name in wanted)

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False

    def update_weights(
        self,
        tensors: "Mapping[str, Tensor]",
        version: int,
        mode: UpdateMode,
        *,
        frozen: bool = False,  # noqa: ARG002 - the engine copies weights into its layout
    ) -> None:
        self._replace(GivenWeights(tensors), version, mode)

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        """Reads one tensor at a time."""
        self._replace(SavedWeights(folder), version, mode)

    def _replace(self, weights: NamedWeights, version: int, mode: UpdateMode) -> None:
        check_mode(mode)
        self._backend.swap(weights)
        self.version = version
        if mode == "recompute":
            for partial in self.abort():
                self.submit(partial.resumed)

    def onload(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        back = [part for part in reversed(ENGINE_PARTS) if part in self._away and part in parts]
        if back:
            self._backend.wake(back)
            self._away.difference_update(back)

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] = ENGINE_PARTS) -> None:  # noqa: ARG002
        """Frees the KV cache, regardless of `kv`: running sequences are computed again after onload()."""
        going = [part for part in ENGINE_PARTS if part in parts and part not in self._away]
        if not going:
            return
        partials = self.abort()
        self._backend.sleep(going)
        self._away.update(going)
        for partial in partials:
            self.submit(partial.resumed)

    def memory(self) -> EngineMemory:
        return EngineMemory()

    def metrics(self) -> Metrics:
        return {"num_running": float(len(self._live))}

    def report(self) -> EngineReport:
        backend = self._backend
        return EngineReport(invariant=False, reason=backend.reason, attention=backend.name, notes=backend.notes)


def request_seed(seed: int, request: Request) -> int:
    """Derives the seed of a request. Serving engines take one seed per request, so a resumed request gets a new one."""
    return stable_hash(seed, request.noise_key, len(request.generated_ids)) % 2**31


def check_penalty(request: Request) -> None:
    """Raises UserError for a resumed request with a presence penalty.

    A server gets the tokens from before a resumption as a part of the prompt, whose tokens it does not penalize.
    """
    penalty, done = request.params.presence_penalty, len(request.generated_ids)
    if penalty and done:
        raise UserError(
            f"request {request.id}: presence_penalty={penalty:g} would leave out the {done} tokens of the response "
            "from before it was resumed, which the server reads as a part of the prompt. Set it to 0, or set "
            "rollout.engine=native."
        )


def finish_reason(name: str) -> FinishReason:
    """Translates a serving engine's 'stop', 'length' or 'abort'. Raises InterlaceError for another name."""
    known = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
    if name not in known:
        raise InterlaceError(f"the engine ended a request for the unknown reason {name!r}.")
    return known[name]
