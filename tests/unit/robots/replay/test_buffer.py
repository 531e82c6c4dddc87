"""Replay draws valid samples, independent of the memory limit, and exactly across a resume."""

from collections import Counter
from dataclasses import is_dataclass, replace
from pathlib import Path
from typing import get_args, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from interlace.core.episode_counts import EpisodeCounts
from interlace.core.errors import UserError
from interlace.core.messages import Message, Messages, ToolCall, ToolSpec
from interlace.core.recovery import Cause
from interlace.core.runs import Runs
from interlace.core.types import FinishReason, Prompt, RewardResult, Sample, SampleKey, Segment
from interlace.robots.replay.buffer import Drawn, Replay, ReplayConfig
from interlace.robots.replay.trajectory_file import _RECORDS, sample_from_bytes, sample_to_bytes


def trajectory(number: int, *, version: int = 0, reward: float | None = None, size: int = 6) -> Sample:
    random = np.random.default_rng(number)
    segments = tuple(
        Segment(
            parent=None,
            token_ids=random.integers(0, 99, size).astype(np.int32),
            sampled=random.random(size) < 0.5,
            logprobs=-random.random(size, np.float32),
            versions=Runs([(version, size - 2), (version + 1, 2)]),
            inputs={
                "image": random.integers(0, 255, (4, 4, 3)).astype(np.uint8),
                "state": random.random(3, np.float32),
            },
            reward=0.5,
        )
        for _ in range(2)
    )
    prompt = Prompt(
        uid=f"task:{number}", token_ids=np.arange(3, dtype=np.int32), text="go", answer="", metadata={"a": [1]}
    )
    return Sample(
        key=SampleKey(number, number % 4), prompt=prompt, segments=segments, finish_reason=FinishReason.STOP, text="é",
        outcome=RewardResult(reward=1.0, parts={"x": 0.1}, cause=Cause.SANDBOX),
        reward=float(number % 2) if reward is None else reward,
    )  # fmt: skip


def same(one: Sample, other: Sample) -> None:
    assert sample_to_bytes(one) == sample_to_bytes(other)


def test_a_sample_goes_through_a_file_bit_for_bit() -> None:
    sample = trajectory(3)
    found = sample_from_bytes(sample_to_bytes(sample))
    same(sample, found)
    assert (
        found.key == sample.key
        and found.finish_reason is FinishReason.STOP
        and found.versions.pieces == sample.versions.pieces
    )
    for name, array in sample.segments[1].inputs.items():
        assert found.segments[1].inputs[name].dtype == array.dtype
        np.testing.assert_array_equal(found.segments[1].inputs[name], array)


def test_an_agents_sample_goes_through_a_file() -> None:
    """Every record that a sample may hold has a place in the file."""
    call = ToolCall(id="a23456789", name="calculator", arguments={"of": [1, {"é": None}]}, error="")
    messages = (Message(role="user", content="1+1"), Message(role="assistant", content="", tool_calls=(call,)))
    plain = trajectory(3)
    counts = EpisodeCounts(
        num_turns=2,
        num_branches=1,
        history_tokens=9,
        reused_tokens=9,
        tool_calls={"": 1},
        tool_s=(0.25,),
        tool_turns=(1,),
    )
    tool = ToolSpec(name="calculator", description="adds", parameters={"type": "object", "required": ["of"]})
    sample = replace(plain, prompt=replace(plain.prompt, messages=messages, tools=(tool,)), counts=counts)
    found = sample_from_bytes(sample_to_bytes(sample))
    assert found.prompt.messages == messages and found.prompt.tools == (tool,) and found.counts == counts
    same(sample, found)
    assert set(_RECORDS.values()) == _records_within(Sample)


def _records_within(kind: object) -> set[object]:
    """Dataclasses that a value of a type may hold, itself included."""
    if get_args(kind):
        return set().union(*map(_records_within, get_args(kind)))
    if not is_dataclass(kind) or kind is Runs:
        return set()
    names = {"Messages": Messages, "ToolSpec": ToolSpec, "EpisodeCounts": EpisodeCounts}
    return {kind}.union(*(_records_within(hint) for hint in get_type_hints(kind, localns=names).values()))


CONFIGS = st.builds(
    ReplayConfig,
    capacity=st.integers(1, 12),
    order=st.sampled_from(["uniform", "newest", "oldest", "priority"]),
    max_versions_behind=st.none() | st.integers(0, 3),
    max_rounds=st.none() | st.integers(0, 3),
    max_uses=st.none() | st.integers(1, 3),
)
STEPS = st.lists(
    st.tuples(st.sampled_from(["add", "draw", "successes", "priority", "resume"]), st.integers(0, 5)), max_size=25
)


class Script:
    """A replay and what was done to it."""

    def __init__(self, config: ReplayConfig, folder: Path, *, resumes: bool) -> None:
        self.config, self.folder, self.resumes = config, folder, resumes
        self.replay = Replay(config, folder / "0", seed=5)
        self.version = self.added = self.saves = 0
        self.drawn: list[Drawn] = []

    def do(self, step: str, amount: int) -> None:
        if step == "add":
            self.replay.add([trajectory(self.added + i, version=self.version) for i in range(amount)])
            self.added += amount
            self.version += 1
        elif step == "priority":
            self.replay.set_priorities([(number, float(amount + number % 3)) for number in range(self.added)])
        elif step == "resume":
            self.resume()
        else:
            least = 1.0 if step == "successes" else None
            found = self.replay.draw(amount, version=self.version, min_reward=least)
            self.check(found, amount, least)
            self.drawn += found

    def resume(self) -> None:
        if self.resumes:
            self.saves += 1
            checkpoint = self.folder / f"checkpoint{self.saves}"
            checkpoint.mkdir()
            self.replay.save(checkpoint)
            # What happens behind the checkpoint leaves no trace.
            self.replay.add([trajectory(900)])
            self.replay.draw(2, version=self.version)
            self.replay = Replay(self.config, self.folder / str(self.saves), seed=0)
            self.replay.restore(checkpoint)

    def check(self, found: list[Drawn], amount: int, least: float | None) -> None:
        limits = self.config
        assert len(found) <= amount and len({one.number for one in found}) == len(found)
        for one in found:
            assert limits.max_versions_behind is None or one.staleness <= limits.max_versions_behind
            assert limits.max_rounds is None or one.age <= limits.max_rounds
            assert limits.max_uses is None or one.uses <= limits.max_uses
            assert least is None or one.sample.reward >= least
            assert one.staleness == self.version - one.sample.versions.pieces[0][0]
            same(one.sample, trajectory(one.number, version=one.sample.versions.pieces[0][0]))
        if limits.order in ("newest", "oldest"):
            assert [one.number for one in found] == sorted([o.number for o in found], reverse=limits.order == "newest")


@settings(max_examples=60, deadline=None)
@given(config=CONFIGS, steps=STEPS)
def test_draws_do_not_depend_on_memory_or_resumes(
    tmp_path_factory: pytest.TempPathFactory, config: ReplayConfig, steps: list[tuple[str, int]]
) -> None:
    scripts = [
        Script(config.model_copy(update={"in_memory_mib": memory}), tmp_path_factory.mktemp("replay"), resumes=resumes)
        for memory, resumes in ((256.0, False), (0.0, False), (0.002, True))
    ]
    for step, amount in steps:
        for script in scripts:
            script.do(step, amount)
    first = scripts[0]
    uses = Counter(one.number for one in first.drawn)
    for script in scripts:
        assert [(one.number, one.uses, one.probability) for one in script.drawn] == [
            (one.number, one.uses, one.probability) for one in first.drawn
        ]
        counts = script.replay.counts()
        assert script.replay.uses() == first.replay.uses() == {n: uses[n] for n in first.replay.uses()}
        assert counts.total_uses == len(first.drawn) and len(script.replay) <= config.capacity
        assert counts.evicted + counts.size == first.added
    assert scripts[1].replay.counts().in_memory == 0


def test_high_priorities_are_drawn_more_often(tmp_path: Path) -> None:
    replay = Replay(ReplayConfig(order="priority", priority_exponent=2.0), tmp_path, seed=1)
    replay.add([trajectory(number) for number in range(4)], priorities=[1.0, 1.0, 1.0, 3.0])
    drawn = Counter(replay.draw(1, version=0)[0].number for _ in range(1200))
    assert replay.draw(1, version=0)[0].probability in (0.75, 1 / 12)
    assert drawn[3] / 1200 == pytest.approx(0.75, abs=0.04) and all(50 < drawn[n] < 150 for n in range(3))


def test_files_leave_with_their_last_trajectory(tmp_path: Path) -> None:
    replay = Replay(ReplayConfig(capacity=2, in_memory_mib=0), tmp_path / "live", seed=1)
    replay.add([trajectory(0), trajectory(1)])
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    replay.save(checkpoint)
    replay.add([trajectory(2), trajectory(3)])
    assert len(list((tmp_path / "live").iterdir())) == 1
    assert replay.counts().evicted_unused == 2
    replay.restore(checkpoint)
    assert {one.sample.key.gid for one in replay.draw(5, version=0)} == {0, 1}


def test_what_cannot_be_restored_is_said(tmp_path: Path) -> None:
    replay = Replay(ReplayConfig(in_memory_mib=0), tmp_path / "live", seed=1)
    with pytest.raises(UserError, match="holds no replay"):
        replay.restore(tmp_path)
    replay.add([trajectory(0)])
    checkpoint = tmp_path / "checkpoint"
    checkpoint.mkdir()
    replay.save(checkpoint)
    next(checkpoint.glob("*.trajectories")).unlink()
    with pytest.raises(UserError, match="is missing: resume from an earlier"):
        Replay(ReplayConfig(), tmp_path / "other", seed=1).restore(checkpoint)
    with pytest.raises(UserError, match="a priority of nan"):
        replay.set_priorities([(0, float("nan"))])
