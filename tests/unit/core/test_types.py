"""Values that cross a boundary are immutable."""

import dataclasses
import inspect
import types

import numpy as np
import pytest

from interlace.algorithms import base
from interlace.core import training
from interlace.core import types as core_types
from interlace.core.types import (
    FinishReason,
    Prompt,
    Request,
    Response,
    Sample,
    SampleGroup,
    SampleKey,
    SamplingParams,
    Segment,
)
from interlace.engines.rollout import protocol


def dataclasses_of(module: types.ModuleType) -> list[type]:
    found = inspect.getmembers(module, lambda value: inspect.isclass(value) and dataclasses.is_dataclass(value))
    return [cls for _, cls in found if cls.__module__ == module.__name__]


@pytest.mark.parametrize(
    "cls",
    [cls for module in (core_types, training, protocol, base) for cls in dataclasses_of(module)],
    ids=lambda c: c.__name__,
)
def test_boundary_types_are_frozen_named_and_slotted(cls: type) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]
    assert all(field.kw_only for field in dataclasses.fields(cls))
    copied_as_dictionaries = cls in (Sample, Segment)  # by a channel, by a pickler
    assert ("__slots__" in vars(cls)) != copied_as_dictionaries


def prompt(length: int) -> Prompt:
    return Prompt(uid="task/7", token_ids=np.arange(length, dtype=np.int32), text="?", answer="!")


def test_a_fresh_sample_counts_only_its_prompt() -> None:
    sample = Sample(key=SampleKey(0, 1), prompt=prompt(5))
    assert (sample.num_tokens, sample.num_total_tokens) == (0, 5)


def test_a_group_counts_prompt_and_response_of_every_sample() -> None:
    samples = tuple(
        Sample(key=SampleKey(0, i), prompt=prompt(5), segments=(Segment(token_ids=np.zeros(n, np.int32)),))
        for i, n in enumerate((2, 3, 0))
    )
    assert SampleGroup(gid=0, step=0, samples=samples).num_total_tokens == 3 * 5 + 2 + 3


def test_noise_and_ids_tell_samples_attempts_and_turns_apart() -> None:
    asked = [
        Request(
            uid=uid, owner=SampleKey(3, index), attempt=attempt, turn=turn, prompt_ids=(1,), params=SamplingParams()
        )
        for uid in ("a", "a#0", "a#0#1/1")
        for index in (0, 1)
        for attempt in (0, 1)
        for turn in (0, 1, 2)
    ]
    assert len({request.id for request in asked}) == len({request.noise_key for request in asked}) == 36


def test_the_first_turn_keeps_the_noise_of_a_sample_with_one() -> None:
    """What engines hash: another text would change every sample of every run."""
    request = Request(uid="a", owner=SampleKey(3, 2), attempt=1, prompt_ids=(1,), params=SamplingParams())
    assert (request.noise_key, request.id) == ("a#1#2", "a#1#2#3")


def test_a_completion_resumes_with_all_it_has() -> None:
    request = Request(uid="a", owner=SampleKey(7, 1), prompt_ids=[1, 2], params=SamplingParams())
    done = Response(
        request=request,
        token_ids=(3, 4),
        logprobs=(-0.1, -0.2),
        versions=(0, 1),
        finish_reason=FinishReason.ABORTED,
        raw_logprobs=(-0.3, -0.4),
    )
    resumed = done.resumed
    assert resumed.id == request.id and resumed.prompt_ids == [1, 2]
    assert (resumed.generated_ids, resumed.generated_logprobs) == ((3, 4), (-0.1, -0.2))
    assert (resumed.generated_versions, resumed.generated_raw_logprobs) == ((0, 1), (-0.3, -0.4))
