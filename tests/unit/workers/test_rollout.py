"""One call of the rollout worker serves for a bounded time."""

import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import pytest
from torch import Tensor

from interlace.core.progress import Progress
from interlace.core.types import NO_GROUP, FinishReason, Request, SampleKey, SamplingParams
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train.export import list_named_weights
from interlace.models.tiny import build_tiny
from interlace.runtime.worker import WorkerContext
from interlace.weights.config import WeightsConfig
from interlace.weights.ref import Route, WeightRef
from interlace.weights.transports.object_store import MessageSource
from interlace.weights.writer import WeightWriter
from interlace.workers.rollout import (
    CALL_GAPS,
    MIN_CALL_S,
    NUM_GAPS,
    CallLength,
    ResponseDecoder,
    RolloutBundle,
    RolloutWorker,
)

LENGTHS = (2, 4, 4, 9)
REQUESTS = tuple(
    Request(
        uid="p", owner=SampleKey(NO_GROUP, index), prompt_ids=[1, 2, 3], params=SamplingParams(max_new_tokens=length)
    )
    for index, length in enumerate(LENGTHS)
)


def worker_at(times: Iterable[float]) -> RolloutWorker:
    """One whose clock shows these times, the next each time it is asked."""
    model, tokenizer = build_tiny("micro", seed=0)
    engine = NativeEngine(model, config=NativeConfig(steps_per_schedule=1))
    serving = RolloutBundle(engine=engine, tokenizer=tokenizer, stop_token_ids=())
    context = WorkerContext(group="rollout/0", rank=0, num_ranks=1, devices=())
    shown = iter(times)
    return RolloutWorker(context, lambda _: serving, now=lambda: next(shown))


def lengths_of(progress: Progress) -> list[int]:
    return [len(response.token_ids) for response in progress.responses]


def test_a_call_that_lasts_ends_as_something_finishes() -> None:
    worker = worker_at(count(step=MIN_CALL_S))
    calls = [worker.serve(REQUESTS, ())]
    while calls[-1].num_running:
        calls.append(worker.serve((), ()))
    assert [lengths_of(call) for call in calls] == [[2], [4, 4], [9]]
    assert sum(call.num_new_tokens for call in calls) == sum(LENGTHS)


def test_what_finishes_sooner_waits_for_company() -> None:
    # The first computes the prompt of all, so that the others are a step behind it.
    worker = worker_at(MIN_CALL_S * part for part in (0, 0.2, 0.4, 0.5, 0.6, 1, 2, *range(3, 20)))
    assert lengths_of(worker.serve(REQUESTS, ())) == [2, 4, 4]
    assert lengths_of(worker.serve((), ())) == [9], "nothing is left: nothing to wait for"


def test_calls_from_far_away_last_longer() -> None:
    length, now_s = CallLength(), 0.0
    for _ in range(NUM_GAPS):
        assert length.begin(now_s) == MIN_CALL_S
        length.end(now_s := now_s + 1.0, has_more=True)
        now_s += 0.03
    assert length.begin(now_s) == pytest.approx(CALL_GAPS * 0.03)
    length.end(now_s := now_s + 1.0, has_more=False)
    assert length.begin(now_s + 60.0) == pytest.approx(CALL_GAPS * 0.03), "an idle engine does not wait for calls"


def test_an_interruption_ends_a_call_at_once_and_what_was_taken_out_comes_with_it() -> None:
    worker = worker_at([0.0] * 4)
    worker.interrupt()
    begun = worker.serve(REQUESTS, ())
    assert not begun.responses and begun.num_running + begun.num_waiting == len(REQUESTS)
    worker.interrupt()
    progress = worker.serve((), [REQUESTS[-1].id])
    assert lengths_of(progress) == [0, 2] and progress.num_running == 2
    assert progress.responses[0].finish_reason == FinishReason.ABORTED


def test_special_tokens_stay_in_a_text_except_those_that_end_it() -> None:
    _, tokenizer = build_tiny("micro-chat", seed=0)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<result>", "<stop>"]})
    result, stop = tokenizer.convert_tokens_to_ids(["<result>", "<stop>"])
    decoder = ResponseDecoder(tokenizer, (tokenizer.eos_token_id,), writes_text=True)
    letter = tokenizer.encode("7", add_special_tokens=False)
    ids = [result, *letter, result, tokenizer.eos_token_id]
    assert decoder.decode_text(ids, SamplingParams()) == "<result>7<result>"
    assert decoder.decode_text([*letter, stop], SamplingParams(stop_token_ids=(stop,))) == "7"
    assert decoder.decode_text([*letter, stop], SamplingParams()) == "7<stop>"


def test_a_sequence_that_cannot_be_finished_is_refused_with_the_reason() -> None:
    overflows = SamplingParams.model_construct(logit_bias=((5, 1e39),), max_new_tokens=4)
    asked = [Request(uid="q", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1, 2], params=overflows), REQUESTS[3]]
    worker = worker_at(count(step=MIN_CALL_S))
    found = [*worker.serve(asked, ()).responses, *worker.serve((), ()).responses]
    assert [bool(one.failure) for one in found] == [True, False] and "logit_bias" in found[0].failure


@dataclass(frozen=True, eq=False)
class StoredTable(Mapping[str, Tensor]):
    """A table in a store, which arrives after an event."""

    tensors: Mapping[str, Tensor]
    arrival: threading.Event

    def __getitem__(self, name: str) -> Tensor:
        assert self.arrival.wait(60)
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        assert self.arrival.wait(60)
        return len(self.tensors)


def test_an_engine_generates_until_expected_weights_have_arrived() -> None:
    config = WeightsConfig(transport="object_store")
    written = WeightWriter(Route(transport="object_store", config=config)).write(
        1, dict(list_named_weights(build_tiny("micro", seed=1)[0]))
    )
    table = StoredTable(cast("MessageSource", written.source).tensors, threading.Event())
    ref = WeightRef(version=1, parts=(replace(written, source=MessageSource(tensors=table)),))
    steps = count()

    def act() -> Iterator[float]:
        """Acts at some steps of the call: the version is announced, and arrives later."""
        for step in steps:
            if step == 5:
                worker.expect_weights(ref)
            if step == 25:
                table.arrival.set()
            yield 0.0

    worker = worker_at(act())
    asked = replace(REQUESTS[0], params=SamplingParams(max_new_tokens=1000))
    progress = worker.serve([asked], ())
    assert table.arrival.is_set() and 20 <= progress.num_new_tokens < 1000 and progress.num_running == 1
    worker.update_weights(ref, "keep")
    [response] = worker.serve((), ()).responses  # nothing interrupts the next call
    assert len(response.token_ids) == 1000 and {*response.versions} == {0, 1}
