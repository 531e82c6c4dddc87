"""A tree of segments trains like its branches, with each token computed once."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from interlace.core.training import Aggregation, LossInputs, LossOutputs, UpdateConfig
from interlace.core.types import PROMPT, Prompt, Sample, SampleKey, Segment
from interlace.engines.train import LogprobEngine, OptimizerConfig, TrainConfig, TrainEngine, attention
from interlace.engines.train.packing import collate
from interlace.engines.train.trie import Trie
from tests.unit.engines.train.models import tiny_model
from tests.unit.engines.train.trees import FORESTS, Forest, logprobs_alone, trained, tree_samples

CASES = [("qwen2", True), ("qwen2", False), ("mistral", True), ("gemma2", True), ("mistral", False), ("bloom", False)]
"""Model, and whether the kernel may attend. mistral's and gemma2's windows slide; bloom is padded."""
ROBOT = [(0, [(1, 5, "some"), (1, 3, "some"), (1, 1, "none"), (1, 4, "some")])]
COMB = [(1, [(0, 3, "all"), (2, 2, "none"), (3, 4, "all"), (2, 3, "all"), (0, 1, "all"), (4, 2, "all")])] * 2


@contextmanager
def attending(kernel: bool) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if not kernel:
            patch.setattr(attention, "is_available", lambda: False)
        yield


def weighted(inputs: LossInputs) -> LossOutputs:
    """A loss whose gradient differs from token to token."""
    return LossOutputs(loss_T=-inputs.advantages_T * inputs.logprobs_T, metrics_T={})


@pytest.mark.parametrize(("kind", "kernel"), CASES)
@settings(max_examples=12, deadline=None)
@given(forest=FORESTS, budget=st.sampled_from([1, 40, 1000]))
@example(forest=ROBOT, budget=1000)
@example(forest=COMB, budget=1000)
def test_log_probs_loss_and_gradients_are_those_of_each_branch_alone(
    kind: str, kernel: bool, forest: Forest, budget: int
) -> None:
    samples, plain = tree_samples(forest), tiny_model(kind)
    alone = [logprobs_alone(plain, sample) for sample in samples]
    with attending(kernel):
        engine = TrainEngine(
            tiny_model(kind),
            loss=weighted,
            optimizer=OptimizerConfig(),
            config=TrainConfig(tokens_per_microbatch=budget),
        )
        for found, wanted in zip(engine.logprobs(samples), alone, strict=True):
            np.testing.assert_allclose(found, wanted.detach().numpy(), atol=3e-5)
        engine.accumulate(samples)
    losses = [-(torch.from_numpy(s.advantages) * own)[trained(s)] for s, own in zip(samples, alone, strict=True)]
    loss, count = torch.cat(losses).sum(), sum(map(len, losses))
    if loss.requires_grad:
        loss.backward()
    for (name, mine), other in zip(engine.model.named_parameters(), plain.parameters(), strict=True):
        if mine.grad is None:
            assert other.grad is None or not other.grad.any(), name
        else:
            assert other.grad is not None
            np.testing.assert_allclose(mine.grad, other.grad, atol=1e-4, rtol=1e-3, err_msg=name)
    metrics = engine.optimizer_step()
    assert metrics["actor/skipped_minibatches"] == float(count == 0)
    if count:
        assert metrics["actor/loss"] == pytest.approx(float(loss.detach()) / count, abs=1e-4)


@settings(max_examples=40, deadline=None)
@given(forest=FORESTS)
def test_a_row_has_each_token_once(forest: Forest) -> None:
    samples = [sample for sample in tree_samples(forest) if sample.num_tokens]
    if not samples or all(segment.parent is None for sample in samples for segment in sample.segments):
        return
    trie = Trie.of(samples)
    leaves = 0
    for sample in samples:
        parents = {segment.parent for segment in sample.segments}
        leaves += sum(place not in parents and len(own.token_ids) > 0 for place, own in enumerate(sample.segments))
    answering = [sample for sample in samples if any(segment.parent == PROMPT for segment in sample.segments)]
    prompts = {sample.prompt.uid: len(sample.prompt.token_ids) for sample in answering}
    assert len(trie.token_ids_S) == sum(prompts.values()) + sum(sample.num_tokens for sample in samples) - leaves
    for own in trie.branches:
        for branch in own:
            assert trie.positions_S[branch].tolist() == list(range(len(branch)))


def conversation(*segments: Segment) -> Sample:
    prompt = Prompt(uid="p", token_ids=np.array([3, 4, 5], np.int32), text="", answer="")
    length = sum(len(segment.token_ids) for segment in segments)
    return Sample(
        key=SampleKey(0, 0), prompt=prompt, segments=segments, advantages=np.arange(1, length + 1, dtype=np.float32)
    )


def turn(parent: int | None, *token_ids: int) -> Segment:
    ids = np.array(token_ids, np.int32)
    return Segment(parent=parent, token_ids=ids, logprobs=np.zeros(len(ids), np.float32))


def put_in(parent: int | None, *token_ids: int) -> Segment:
    ids = np.array(token_ids, np.int32)
    mask, zeros = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.float32)
    return Segment(parent=parent, token_ids=ids, sampled=mask, logprobs=zeros, kind="tool")


def trained_tokens(sample: Sample) -> list[tuple[int, float]]:
    """(token, advantage) of what the loss is given."""
    seen: list[tuple[int, float]] = []

    def loss(inputs: LossInputs) -> LossOutputs:
        seen.extend(zip(targets, inputs.advantages_T.tolist(), strict=True))
        return LossOutputs(loss_T=-inputs.logprobs_T, metrics_T={})

    engine = TrainEngine(tiny_model(), loss=loss, optimizer=OptimizerConfig(), config=TrainConfig())
    targets = collate([sample], engine.packed.device, padded=False, masks=[sample.loss_mask]).targets_T.tolist()
    engine.accumulate([sample])
    assert engine.optimizer_step()["actor/skipped_minibatches"] == 0
    return seen


def test_of_two_turns_with_a_tool_between_the_policys_own_tokens_are_trained() -> None:
    two_turns = conversation(turn(PROMPT, 10, 11), put_in(0, 20, 21, 22), turn(1, 12, 13))
    assert trained_tokens(two_turns) == [(10, 1), (11, 2), (12, 6), (13, 7)]
    straight = conversation(
        Segment(
            token_ids=two_turns.token_ids,
            sampled=np.array([True, True, False, False, False, True, True]),
            logprobs=two_turns.logprobs,
        )
    )
    engine = LogprobEngine(tiny_model(), config=TrainConfig())
    assert (engine.logprobs([two_turns])[0] == engine.logprobs([straight])[0]).all(), "a chain is one sequence"


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_a_tree_is_one_sample_to_a_loss(aggregation: Aggregation) -> None:
    samples = [sample for sample in tree_samples([*COMB, (0, [(0, 3, "all")])]) if sample.num_tokens]
    config = TrainConfig(update=UpdateConfig(aggregation=aggregation))
    engine = TrainEngine(tiny_model(), loss=weighted, optimizer=OptimizerConfig(), config=config)
    losses = [
        -torch.from_numpy(sample.advantages)[trained(sample)] * own[trained(sample)]
        for sample, own in zip(samples, [logprobs_alone(tiny_model(), sample) for sample in samples], strict=True)
    ]
    expected = {
        "token_mean": torch.cat(losses).mean(),
        "seq_mean_token_mean": torch.stack([own.mean() for own in losses]).mean(),
        "seq_mean_token_sum": torch.stack([own.sum() for own in losses]).mean(),
    }[aggregation]
    engine.accumulate(samples)
    assert engine.optimizer_step()["actor/loss"] == pytest.approx(float(expected.detach()), abs=1e-4)


def test_a_history_that_branches_share_is_trained_once() -> None:
    forked = conversation(turn(PROMPT, 10, 11), put_in(0, 20), turn(1, 12, 13), put_in(0, 21), turn(3, 14))
    assert trained_tokens(forked) == [(10, 1), (11, 2), (12, 4), (13, 5), (14, 7)]


def test_a_context_of_its_own_begins_with_what_the_policy_was_shown() -> None:
    step = Segment(
        parent=None, token_ids=np.array([30, 31, 15], np.int32), sampled=np.array([False, False, True]),
        logprobs=np.zeros(3, np.float32), kind="step",
    )  # fmt: skip
    robot = conversation(step, step)
    assert trained_tokens(robot) == [(15, 3), (15, 6)]
    engine = LogprobEngine(tiny_model(), config=TrainConfig())
    (found,) = engine.logprobs([robot])
    assert found[0] == found[3] == 0, "nothing predicts them"
    assert (found[:3] == found[3:]).all(), "neither sees the other, nor the prompt"
    with pytest.raises(ValueError, match=r"segment 1, which begins a context of its own"):
        engine.logprobs([conversation(turn(PROMPT, 10), turn(None, 11, 12))])


def test_a_parent_that_comes_later_is_refused() -> None:
    with pytest.raises(ValueError, match="segment 0 has parent 1"):
        LogprobEngine(tiny_model(), config=TrainConfig()).logprobs([conversation(turn(1, 10), turn(PROMPT, 11))])
