"""Worker of a reference, or of another model that computes likelihoods, in an engine service."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np

from interlace.core.errors import DiskFullError, InterlaceError, UserError
from interlace.core.state_parts import STATE
from interlace.core.trajectory import branches
from interlace.core.types import FloatArray, Sample
from interlace.runtime.worker import Worker, WorkerContext, operation

RETRY_S, PATIENCE_S = 1.0, 600.0
"""Seconds between two attempts to restore a lost service, and in total, if no other service can score."""


class ScoringService(Protocol):
    """An engine that computes log-probs of given tokens."""

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Returns the log-prob of each token after the first of each sequence. Raises ServiceError if it is lost."""

    def recover(self) -> str:
        """Restores a lost service. Returns the reason if that failed, else an empty text."""

    def close(self) -> None: ...


class ScoringWorker(Worker):
    """Log-probs under fixed weights, computed by services. If one is lost, the next one computes them."""

    def __init__(
        self, context: WorkerContext, make_engine: Callable[[WorkerContext], Sequence[ScoringService]]
    ) -> None:
        super().__init__(context)
        self._services = [*make_engine(context)]
        self._next = 0

    @operation(bin="inference", phase="reference", split="samples", collect="concat")
    def logprobs(self, samples: Sequence[Sample]) -> list[FloatArray]:
        """Returns log-probs [L] of each sample; 0 for the first token of a context without a prompt."""
        found = [np.zeros(sample.num_tokens, np.float32) for sample in samples]
        paths = [(number, path) for number, sample in enumerate(samples) for path in _list_paths(sample)]
        scored = self._score([path.token_ids for _, path in paths])
        for (number, path), after_first in zip(paths, scored, strict=True):
            logprobs = np.asarray([0.0, *after_first], np.float32)
            for start, target, length in path.places:
                found[number][target : target + length] = logprobs[start : start + length]
        return found

    @operation(on_device=False)
    def attention(self) -> str:
        return "laid out by an engine service"

    @operation(on_device=False)
    def memory_parts(self) -> Mapping[str, int]:
        return {STATE: 0}

    def onload(self, parts: Sequence[str] | None = None) -> None:
        """Does nothing, because the services hold the memory."""

    def offload(self, parts: Sequence[str] | None = None) -> None:
        """Does nothing."""

    def close(self) -> None:
        for service in self._services:
            service.close()

    def _score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        deadline, wait = time.monotonic() + PATIENCE_S, threading.Event()
        while True:
            reasons = []
            for _ in self._services:
                service = self._services[self._next % len(self._services)]
                self._next += 1
                try:
                    return service.score(sequences)
                except InterlaceError as error:
                    _raise_if_final(error)
                    reasons.append(str(error))
                    service.recover()
            if time.monotonic() > deadline:
                raise InterlaceError(f"no engine service could score: {'; '.join(reasons)}")
            wait.wait(RETRY_S)


def _raise_if_final(error: InterlaceError) -> None:
    """Raises the error if every service would refuse the same input."""
    if isinstance(error, UserError) and not isinstance(error, DiskFullError):
        raise error


class _Path(NamedTuple):
    """The tokens from a root of a sample to one leaf."""

    token_ids: list[int]
    places: list[tuple[int, int, int]]
    """For each segment on the path: its start in `token_ids`, its start among the sample's tokens, and its length."""


def _list_paths(sample: Sample) -> list[_Path]:
    """Lists the paths of a sample, one for each leaf."""
    segments = [segment.token_ids.tolist() for segment in sample.segments]
    starts = [0, *accumulate(map(len, segments))]
    found = []
    for branch in branches(sample.segments):
        begins_anew = sample.segments[branch[0]].parent is None
        tokens = [] if begins_anew else sample.prompt.token_ids.tolist()
        places = []
        for number in branch:
            places.append((len(tokens), starts[number], len(segments[number])))
            tokens += segments[number]
        found.append(_Path(tokens, places))
    return found
