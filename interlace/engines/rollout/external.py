"""Shared parts of the adapters of serving engines: the book-keeping of live requests, and the plain verbs."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from interlace.core.errors import InterlaceError, UserError
from interlace.core.random import stable_hash
from interlace.core.types import Completion, FinishReason, Metrics, Request, SampleKey
from interlace.engines.rollout.named_weights import GivenWeights, NamedWeights
from interlace.engines.rollout.protocol import (
    ENGINE_PARTS,
    EngineMemory,
    EngineReport,
    StepOutput,
    SwitchMode,
    check_mode,
)
from interlace.weights.ref import UpdateMode
from interlace.weights.saved import SavedWeights

if TYPE_CHECKING:
    from torch import Tensor

Generated: TypeAlias = tuple[str, Sequence[int], Sequence[float], FinishReason | None]
"""A request's id, its new tokens, their log-probs, and how it ended; None where it goes on."""
NO_LOGPROB = -9999.0
"""Value that serving engines put where they have no log-prob, or one of minus infinity."""


@dataclass(slots=True, eq=False)
class _Progress:
    request: Request
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class LiveRequests:
    """Requests a serving engine works on, and the tokens it has sent back."""

    def __init__(self) -> None:
        self._live: dict[str, _Progress] = {}

    def __len__(self) -> int:
        return len(self._live)

    def __contains__(self, name: str) -> bool:
        return name in self._live

    def named(self, ids: Sequence[str] | None) -> list[str]:
        """Returns the live ones of these ids, each once; None: all live ids, in order of submission."""
        return list(self._live) if ids is None else [name for name in dict.fromkeys(ids) if name in self._live]

    def rows(self) -> list[tuple[str, Request, tuple[int, ...]]]:
        """Lists each live request: its id, itself and all tokens it has got, those before a resumption too."""
        return [(name, one.request, tuple(one.token_ids)) for name, one in self._live.items()]

    def add(self, request: Request) -> None:
        """Raises UserError for an empty prompt and for raw log-probs, ValueError where the id is live."""
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already live")
        if not request.prompt_ids:
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
        """Returns the tokens of each live request that streams, those before a resumption too."""
        return {name: tuple(one.token_ids) for name, one in self._live.items() if one.request.streams}

    def num_sent(self, name: str) -> int:
        """Counts tokens that came back since the request was submitted."""
        progress = self._live[name]
        return len(progress.token_ids) - len(progress.request.generated_ids)

    def extend(self, name: str, token_ids: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        """Adds tokens that came back. Raises InterlaceError for a log-prob that is none."""
        for token, logprob in zip(token_ids, logprobs, strict=True):
            if not NO_LOGPROB < logprob < math.inf:  # false for NaN too
                raise InterlaceError(
                    f"request {name}: the engine gave {logprob} as the log-prob of token {token} that it sampled, which"
                    " is what stands where it has none. Training on it would go wrong without a word."
                )
        progress = self._live[name]
        progress.token_ids += token_ids
        progress.logprobs += logprobs
        progress.versions += [version] * len(token_ids)

    def set_versions(self, name: str, versions: Sequence[int]) -> None:
        """Corrects the versions of the last tokens that came back. Raises InterlaceError if there are fewer tokens."""
        if len(versions) > self.num_sent(name):
            raise InterlaceError(
                f"request {name}: the engine reported versions of {len(versions)} tokens, and sent fewer."
            )
        if versions:
            self._live[name].versions[-len(versions) :] = versions

    def end(self, name: str, reason: FinishReason, num_cached_tokens: int = 0) -> Completion:
        """Takes a request out."""
        progress = self._live.pop(name)
        return Completion(
            request=progress.request,
            token_ids=tuple(progress.token_ids),
            logprobs=tuple(progress.logprobs),
            versions=tuple(progress.versions),
            finish_reason=reason,
            num_cached_tokens=num_cached_tokens,
        )


class ExternalEngine(ABC):
    """The rollout protocol over an engine that is fed requests and answers with tokens.

    A subclass says what the next tokens are and how weights are replaced, and where requests are sent elsewhere, how.
    """

    name: str
    """Name of the engine in a report."""
    reason: str = "this engine's bits may depend on what shares a batch"
    """Why samples depend on what shares their batch."""
    notes: tuple[str, ...] = ()
    """Remarks that a report adds."""
    gives_up_parts = False

    def __init__(self, seed: int = 0) -> None:
        """seed: of the sampling noise; see request_seed()."""
        self._live, self._seed, self._version = LiveRequests(), seed, 0
        self._paused = False
        self._away: set[str] = set()
        """Parts of the state that are off the device."""

    def _send(self, request: Request) -> None:  # noqa: B027 - one that reads the live requests needs none
        """Hands a request over. Raises UserError for one that cannot be served."""

    @abstractmethod
    def _advance(self) -> Iterable[Generated]:
        """Yields what the live requests have got since the last call, waiting for at least one of them."""

    def _drop(self, names: Sequence[str]) -> None:  # noqa: B027 - likewise
        """Ends live requests; nothing more is yielded of them."""

    @abstractmethod
    def _swap(self, weights: NamedWeights) -> None:
        """Replaces all weights, or none and raises UserError where they do not fit. Called between two steps."""

    def _sleep(self, parts: Sequence[str]) -> None:  # noqa: B027 - where there is nothing to free
        """Frees parts of the state, or all of it where they cannot go apart; nothing is live then."""

    def _wake(self, parts: Sequence[str]) -> None:  # noqa: B027 - likewise
        """Undoes _sleep(), weights first."""

    @property
    def version(self) -> int:
        return self._version

    def submit(self, request: Request) -> None:
        self._live.add(request)
        try:
            self._send(request)
        except BaseException:  # refused, a prompt that is too long for one: it will get no answer
            self._live.end(request.id, FinishReason.ABORTED)
            raise

    def step(self) -> StepOutput:
        finished: list[Completion] = []
        new_tokens = 0
        if len(self._live) and not self._paused and not self._away:
            for name, token_ids, logprobs, ended in self._advance():
                self._live.extend(name, token_ids, logprobs, self._version)
                new_tokens += len(token_ids)
                if ended is not None:
                    finished.append(self._live.end(name, ended))
        return StepOutput(
            finished=tuple(finished),
            num_running=len(self._live),
            num_new_tokens=new_tokens,
            drawn=self._live.drawn(),
        )

    def interrupt(self) -> None:  # noqa: B027 - a step is short
        """Does nothing: a step is one forward pass."""

    def release(self, owners: Sequence[SampleKey]) -> None:  # noqa: B027 - no cache is kept between requests
        """Does nothing."""

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Completion, ...]:
        wanted = self._live.named(ids)
        self._drop(wanted)
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
        frozen: bool = False,  # noqa: ARG002 - the engine lays weights out its own way and so copies them
    ) -> None:
        self._replace(GivenWeights(tensors), version, mode)

    def load(self, folder: str | Path, version: int, mode: UpdateMode) -> None:
        """Reads one tensor at a time."""
        self._replace(SavedWeights(folder), version, mode)

    def _replace(self, weights: NamedWeights, version: int, mode: UpdateMode) -> None:
        check_mode(mode)
        self._swap(weights)
        self._version = version
        if mode == "recompute":
            for partial in self.abort():
                self.submit(partial.resumed)

    def onload(self, parts: Sequence[str] = ENGINE_PARTS) -> None:
        back = [part for part in reversed(ENGINE_PARTS) if part in self._away and part in parts]
        if back:
            self._wake(back)
            self._away.difference_update(back)

    def offload(self, kv: SwitchMode = "offload", parts: Sequence[str] = ENGINE_PARTS) -> None:  # noqa: ARG002
        """Frees the KV cache, whatever `kv` asks: running sequences are computed again after onload()."""
        going = [part for part in ENGINE_PARTS if part in parts and part not in self._away]
        if not going:
            return
        partials = self.abort()
        self._sleep(going)
        self._away.update(going)
        for partial in partials:
            self.submit(partial.resumed)

    def memory(self) -> EngineMemory:
        return EngineMemory()

    def metrics(self) -> Metrics:
        return {"num_running": float(len(self._live))}

    def report(self) -> EngineReport:
        return EngineReport(invariant=False, reason=self.reason, attention=self.name, notes=self.notes)


def request_seed(seed: int, request: Request) -> int:
    """Draws a request's seed: serving engines have one per request, so a resumed request needs one of its own."""
    return stable_hash(seed, request.noise_key, len(request.generated_ids)) % 2**31


def finish_reason(name: str) -> FinishReason:
    """Returns what a serving engine's 'stop', 'length' or 'abort' stands for. Raises InterlaceError for another."""
    known = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
    if name not in known:
        raise InterlaceError(f"the engine ended a request for the reason {name!r}, of which nothing is known.")
    return known[name]
