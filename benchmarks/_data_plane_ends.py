"""The processes of `data_plane.py`, in an importable module: an engine that draws nothing, and readers of samples."""

import time
from collections.abc import Sequence

import numpy as np

from interlace.core import payload
from interlace.core.types import FinishReason, Request, Response, Sample, SampleKey
from interlace.engines.rollout.protocol import EngineMemory, StepOutput
from interlace.runtime.worker import Worker, WorkerContext, operation
from interlace.workers.rollout import RolloutBundle, RolloutWorker

LETTERS_PER_TOKEN = 4
PER_STEP = 8
"""Responses that finish in one step."""


class Letters:
    """Tokenizer whose every token has four letters."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:  # noqa: ARG002 - the interface of a tokenizer
        return "abcd" * len(token_ids)


class FinishedEngine:
    """Engine whose requests finish at once, each with the same number of tokens."""

    gives_up_parts = False
    version = 0

    def __init__(self, length: int) -> None:
        draw = np.random.default_rng(0)
        self._tokens = [tuple(draw.integers(0, 150_000, length).tolist()) for _ in range(PER_STEP)]
        self._logprobs = [tuple((-draw.random(length)).tolist()) for _ in range(PER_STEP)]
        self._versions = (0,) * length
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    def step(self) -> StepOutput:
        begun, self._waiting = self._waiting[:PER_STEP], self._waiting[PER_STEP:]
        found = [
            Response(
                request=request, token_ids=tokens, logprobs=logprobs, versions=self._versions,
                finish_reason=FinishReason.STOP,
            )
            for request, tokens, logprobs in zip(begun, self._tokens, self._logprobs, strict=False)
        ]  # fmt: skip
        return StepOutput(
            finished=tuple(found),
            num_waiting=len(self._waiting),
            num_new_tokens=sum(len(each.token_ids) for each in found),
        )

    def interrupt(self) -> None: ...

    def abort(self, ids: Sequence[str] | None = None) -> tuple[Response, ...]:  # noqa: ARG002 - none is live
        return ()

    def release(self, owners: Sequence[SampleKey]) -> None: ...

    def onload(self, parts: Sequence[str] = ()) -> None: ...

    def memory(self) -> EngineMemory:
        return EngineMemory()


def make_rollout(context: WorkerContext, length: int, by_value: bool) -> RolloutWorker:
    """by_value: replies contain tokens, log-probs and text, as before there were references."""
    if by_value:
        payload.MIN_BYTES = 1 << 62
    bundle = RolloutBundle(engine=FinishedEngine(length), tokenizer=Letters(), stop_token_ids=())  # type: ignore[arg-type]
    return RolloutWorker(context, lambda _: bundle)


class Reader(Worker):
    """A reward and a trainer. Each reads what its role reads, and returns its CPU seconds."""

    @operation(on_device=False, split="samples", collect="all")
    def score(self, samples: Sequence[Sample]) -> float:
        start_s = time.process_time()
        assert all(len(sample.text) == LETTERS_PER_TOKEN * sample.num_tokens for sample in samples)
        return time.process_time() - start_s

    @operation(on_device=False, split="samples", collect="all")
    def train(self, samples: Sequence[Sample]) -> float:
        start_s = time.process_time()
        for sample in samples:
            assert sample.token_ids.sum() > 0 > sample.logprobs.sum()
            assert sample.advantages is not None and len(sample.advantages) == sample.num_tokens
        return time.process_time() - start_s
