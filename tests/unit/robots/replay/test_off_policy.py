"""Turns of replayed trajectories: conversion of samples, uniform draws, evictions, demonstrations."""

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest

from interlace.algorithms.sac import SACSettings
from interlace.core.errors import UserError
from interlace.core.transitions import Learned, TransitionBatch
from interlace.core.types import EMPTY_INT, FINAL, FloatArray, IntArray, Prompt, Sample, SampleKey, Segment
from interlace.robots.replay import off_policy
from interlace.robots.replay.buffer import Replay, ReplayConfig
from interlace.robots.replay.off_policy import OffPolicy, Priorities, TransitionTable, steps_of
from interlace.rollouts.role_groups import ActorGroup

PLACEHOLDER = 9


def sample(gid: int, turns: int, *, cut_off: bool, prompt: int = 5) -> Sample:
    """An episode whose state before turn t is [gid, t], whose action is t / 10 and whose reward is t."""
    segments: list[Segment] = []

    def observe(turn: int, kind: str = "context") -> None:
        seen = {"state": np.array([[gid, turn]], np.float32)}
        ids, mask = np.array([PLACEHOLDER], np.int32), np.zeros(1, np.bool_)
        segments.append(Segment(token_ids=ids, sampled=mask, inputs=seen, kind=kind))

    for turn in range(turns):
        observe(turn)
        action = np.array([turn / 10], np.float32).view(np.int32)
        segments.append(Segment(parent=len(segments) - 1, token_ids=action, reward=float(turn)))
    if cut_off:
        observe(turns)
        segments.append(
            Segment(
                parent=len(segments) - 1, token_ids=np.zeros(1, np.int32), sampled=np.zeros(1, np.bool_), kind=FINAL
            )
        )
    total = float(sum(range(turns)))
    asked = Prompt(uid="a", token_ids=np.array([prompt], np.int32), text="go", answer="")
    return Sample(key=SampleKey(gid, 0), prompt=asked, segments=tuple(segments), reward=total)


def test_a_cut_off_episode_has_a_last_state_and_a_finished_one_has_not() -> None:
    cut, ended = steps_of(sample(1, 3, cut_off=True)), steps_of(sample(1, 3, cut_off=False))
    assert not cut.is_terminal and cut.states[:, 1].tolist() == [0, 1, 2, 3]
    assert ended.is_terminal and ended.rewards.tolist() == [0, 1, 2]
    np.testing.assert_allclose(cut.actions[:, 0], [0, 0.1, 0.2], rtol=1e-6)


def test_the_last_chunk_of_a_cut_off_episode_counts_by_its_executed_share() -> None:
    whole = sample(1, 3, cut_off=True)
    numbers = np.array([0.2, 0.4, 0.6, 0.8], np.float32).view(np.int32)
    chunks = [
        replace(each, token_ids=numbers, sampled=mask)
        for each, mask in zip(whole.segments[1:6:2], (None, None, np.array([True, False, False, False])), strict=True)
    ]
    segments = [part for pair in zip(whole.segments[0:6:2], chunks, strict=True) for part in pair]
    found = OffPolicy(settings=SACSettings(gamma=0.5), seed=0).convert(
        replace(whole, segments=(*segments, *whole.segments[6:]))
    )
    np.testing.assert_allclose(found.discounts, [0.5, 0.5, 0.5**0.25], rtol=1e-6)


def test_the_table_follows_the_replay_and_draws_every_turn(tmp_path: Path) -> None:
    replay = Replay(ReplayConfig(capacity=2, in_memory_mib=0), tmp_path, seed=0)
    learner, table = OffPolicy(settings=SACSettings(gamma=0.5), seed=0), TransitionTable()
    for gid, turns in enumerate((4, 2, 3)):
        replay.add([sample(gid, turns, cut_off=True)])
        table.follow(replay, learner.convert)
    assert len(table) == 5, "the first episode was evicted"
    drawn = table.draw(np.array([4, 0, 1, 2, 0]))
    assert drawn.states.tolist() == [[2, 2], [1, 0], [1, 1], [2, 0], [1, 0]]
    assert drawn.discounts.tolist() == [0.5] * 5
    assert sum(replay.uses().values()) == 0, "reading is not a use"


def test_half_of_a_batch_is_demonstrated(tmp_path: Path) -> None:
    replay = Replay(ReplayConfig(), tmp_path, seed=0)
    replay.add([sample(1, 8, cut_off=False)])
    shown = TransitionBatch(
        states=np.full((3, 2), -7, np.float32),
        actions=np.zeros((3, 1), np.float32),
        rewards=np.ones(3, np.float32),
        next_states=np.zeros((3, 2), np.float32),
        discounts=np.zeros(3, np.float32),
    )
    learner = OffPolicy(settings=SACSettings(turns_per_update=10), seed=0, demonstrations=shown)
    learner.table.follow(replay, learner.convert)
    batches = learner._draw_batches(1, 6, len(learner.table)).batches
    assert len(batches) == 6
    assert all((batch.states[:, 0] == -7).sum() == 5 and len(batch) == 10 for batch in batches)
    again = OffPolicy(settings=SACSettings(turns_per_update=10), seed=0, demonstrations=shown, table=learner.table)
    np.testing.assert_array_equal(again._draw_batches(1, 6, 8).batches[5].states, batches[5].states)


def test_a_second_instruction_is_refused(tmp_path: Path) -> None:
    learner = OffPolicy(settings=SACSettings(), seed=0)
    learner.convert(sample(0, 2, cut_off=True))
    with pytest.raises(UserError, match="one instruction"):
        learner.convert(sample(1, 2, cut_off=True, prompt=6))


def test_turns_without_a_state_are_refused() -> None:
    blind = Segment(token_ids=EMPTY_INT, sampled=None)
    asked = Prompt(uid="a", token_ids=np.array([5], np.int32), text="go", answer="")
    with pytest.raises(UserError, match="`state`"):
        steps_of(Sample(key=SampleKey(0, 0), prompt=asked, segments=(blind,), reward=0.0))


class _Actor:
    """An actor whose second call makes no update of the policy, as with `policy_every` above its updates."""

    def __init__(self) -> None:
        self.answers = [{"off_policy/critic_loss": 1.0, "off_policy/policy_loss": 5.0}, {"off_policy/critic_loss": 3.0}]

    def hold(self, cause: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def learn(
        self, context_ids: IntArray, batches: Sequence[TransitionBatch], weights: Sequence[FloatArray] = ()
    ) -> Learned:
        return Learned(metrics=self.answers.pop(0))


def test_a_call_without_an_update_of_the_policy_lacks_its_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(off_policy, "BLOCK_BYTES", 1)
    replay = Replay(ReplayConfig(), tmp_path, seed=0)
    replay.add([sample(1, 8, cut_off=True)])
    learner = OffPolicy(settings=SACSettings(start_turns=1, turns_per_update=4), seed=0)
    found = asyncio.run(learner.learn(1, replay, 2, cast(ActorGroup, _Actor())))
    assert found["off_policy/critic_loss"] == 2 and found["off_policy/policy_loss"] == 5


def test_a_fraction_of_an_update_is_the_probability_of_one_more(tmp_path: Path) -> None:
    replay = Replay(ReplayConfig(), tmp_path, seed=0)
    replay.add([sample(1, 8, cut_off=True)])
    settings = SACSettings(start_turns=1, turns_per_update=4, updates_per_turn=0.1)
    counts = []
    for step in range(200):
        actor = _Actor()
        actor.answers = [{"off_policy/critic_loss": 1.0}]
        found = asyncio.run(OffPolicy(settings=settings, seed=0).learn(step, replay, 4, cast(ActorGroup, actor)))
        counts.append(found.get("off_policy/updates", 0))
    assert set(counts) == {0, 1} and sum(counts) == pytest.approx(0.1 * 4 * 200, rel=0.15)


def test_a_replay_that_holds_fewer_turns_than_before_makes_no_updates(tmp_path: Path) -> None:
    """A policy that learns ends its episodes earlier, so the replay may lose more turns than it gains."""
    replay = Replay(ReplayConfig(capacity=1), tmp_path, seed=0)
    learner = OffPolicy(settings=SACSettings(start_turns=4, turns_per_update=4), seed=0)
    updates = []
    for gid, turns in enumerate((8, 2, 6)):
        replay.add([sample(gid, turns, cut_off=True)])
        actor = _Actor()
        actor.answers = [{"off_policy/critic_loss": 1.0}]
        found = asyncio.run(learner.learn(gid, replay, turns, cast(ActorGroup, actor)))
        updates.append(found.get("off_policy/updates"))
    assert updates == [8, None, 6]


class _Erring:
    """An actor whose error of a turn is the turn's reward."""

    def hold(self, cause: str) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    async def learn(
        self, context_ids: IntArray, batches: Sequence[TransitionBatch], weights: Sequence[FloatArray] = ()
    ) -> Learned:
        assert len(weights) == len(batches)
        return Learned(metrics={"off_policy/critic_loss": 1.0}, errors=[batch.rewards for batch in batches])


def test_one_turn_with_a_tiny_error_does_not_make_the_weights_of_the_others_vanish() -> None:
    """Prioritised experience replay, section 3.4: (N P)^-beta, divided by the largest weight of the batch."""
    rule = Priorities(exponent=1.0, importance=0.5)
    chances = np.array([0.64, 0.36 - 1e-9, 1e-9])
    found = rule.weights(chances[[[0, 1], [1, 2]]], num_turns=3, num_shown=0)
    np.testing.assert_allclose(found[0], [0.6 / 0.8, 1], rtol=1e-6)
    np.testing.assert_allclose(found[1], [(1e-9 / 0.36) ** 0.5, 1], rtol=1e-6)


def test_demonstrated_turns_have_the_weight_of_a_uniform_draw() -> None:
    rule = Priorities(exponent=1.0, importance=1.0)
    chances = np.array([0.5, 0.25, 0.25])
    [found] = rule.weights(chances[None, :], num_turns=3, num_shown=2)
    np.testing.assert_allclose(found, np.array([2 / 3, 4 / 3, 4 / 3, 1, 1]) / (4 / 3), rtol=1e-6)


def test_turns_are_drawn_by_the_error_of_their_last_update(tmp_path: Path) -> None:
    replay = Replay(ReplayConfig(), tmp_path / "replay", seed=0)
    replay.add([sample(1, 4, cut_off=True)])
    settings, rule = SACSettings(start_turns=1, turns_per_update=8), Priorities(exponent=1.0, importance=0.5)
    learner = OffPolicy(settings=settings, seed=0, priorities=rule)
    learner.table.follow(replay, learner.convert)
    first = learner._draw_batches(1, 50, 4)
    assert all((each == 1).all() for each in first.weights), "new turns have equal priorities"
    asyncio.run(learner.learn(1, replay, 50, cast(ActorGroup, _Erring())))
    np.testing.assert_allclose(learner.table.priorities(), [1e-6, 1, 2, 3], atol=1e-5)
    drawn = learner._draw_batches(2, 500, 4)
    counts = np.bincount(drawn.places.ravel(), minlength=4) / 4000
    np.testing.assert_allclose(counts, [0, 1 / 6, 2 / 6, 3 / 6], atol=0.03)
    chances = learner.table.priorities() / learner.table.priorities().sum()
    expected = (4 * chances[drawn.places[0]]) ** -0.5
    np.testing.assert_allclose(drawn.weights[0], expected / expected.max(), rtol=1e-5)

    learner.table.save(tmp_path)
    resumed = OffPolicy(settings=settings, seed=0, priorities=rule)
    resumed.table.restore(tmp_path)
    resumed.table.follow(replay, resumed.convert)
    np.testing.assert_array_equal(resumed._draw_batches(2, 500, 4).places, drawn.places)
    replay.add([sample(2, 2, cut_off=True)])
    resumed.table.follow(replay, resumed.convert)
    np.testing.assert_allclose(resumed.table.priorities()[4:], 3, atol=1e-5)
    (tmp_path / "priorities.npz").write_bytes(b"x")
    with pytest.raises(UserError, match="is damaged"):
        resumed.table.restore(tmp_path)
