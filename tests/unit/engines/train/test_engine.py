"""The loss and the gradient of a minibatch do not depend on how it was split, packed or ordered."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, PreTrainedModel

from interlace.algorithms import create_algorithm
from interlace.core.training import Aggregation, LossInputs, LossOutputs, UpdateConfig
from interlace.core.types import Metrics, Sample, Segment
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine, sft_loss
from interlace.engines.train.engine import Aggregator
from interlace.engines.train.minibatch import MinibatchReport, merge_metrics
from tests.support.publication import published
from tests.unit.engines.train.models import plain_logits, ragged_samples, tiny_model

AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant")
LENGTH = 32
TOLERANCE = 3e-6
"""Of fp32 sums taken in different orders, on gradients of about 0.01 to 1; of larger ones, of their largest."""


def policy_engine(
    aggregation: Aggregation = "token_mean", *, budget: int = 10_000, kind: str = "qwen2", **skipping: object
) -> TrainEngine:
    algorithm = create_algorithm("grpo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.01})
    return TrainEngine(
        tiny_model(kind),
        loss=algorithm.loss,
        optimizer=OptimizerConfig(lr=1e-2, max_grad_norm=None),
        config=TrainConfig(
            update=UpdateConfig.parse({"aggregation": aggregation, "aggregation_length": LENGTH, **skipping}),
            tokens_per_microbatch=budget,
            temperature=0.9,
        ),
    )


def update(engine: TrainEngine, pieces: Sequence[Sequence[Sample]]) -> tuple[Metrics, list[torch.Tensor]]:
    """Metrics and the gradient that the update used."""
    taken: list[torch.Tensor] = []
    step = engine.optimizer.step

    def record(denominator: float, norm: float) -> None:
        taken.extend(p.grad / denominator for p in engine.model.parameters() if p.grad is not None)
        step(denominator, norm)

    engine.optimizer.step = record  # type: ignore[method-assign]
    for piece in pieces:
        engine.accumulate(piece)
    return engine.optimizer_step(), taken


def plain_update(aggregation: Aggregation, samples: Sequence[Sample]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradient written down from the definitions, one unpacked sequence at a time."""
    model, algorithm = tiny_model(), create_algorithm("grpo", {"kl_coefficient": 0.1, "entropy_coefficient": 0.01})
    totals, lengths = [], []
    for sample in samples:
        scores = (plain_logits(model, sample) / 0.9).log_softmax(-1)
        kept = torch.ones(sample.num_tokens, dtype=torch.bool)
        kept = kept if sample.loss_mask is None else torch.from_numpy(sample.loss_mask)

        def column(values: np.ndarray | None, kept: torch.Tensor = kept) -> torch.Tensor:
            assert values is not None
            return torch.from_numpy(values)[kept]

        loss_T = algorithm.loss(
            LossInputs(
                logprobs_T=scores.gather(-1, torch.from_numpy(sample.token_ids).long()[:, None])[kept, 0],
                entropy_T=-(scores.exp() * scores).sum(-1)[kept],
                behaviour_logprobs_T=column(sample.logprobs),
                proximal_logprobs_T=column(sample.logprobs),
                advantages_T=column(sample.advantages),
                ref_logprobs_T=column(sample.ref_logprobs),
                mask_T=torch.ones(int(kept.sum()), dtype=torch.bool),
                sample_T=torch.zeros(int(kept.sum()), dtype=torch.long),
                num_samples=1,
            )
        ).loss_T
        totals.append(loss_T.mean() if aggregation == "seq_mean_token_mean" else loss_T.sum())
        lengths.append(len(loss_T))
    count = len(samples)
    denominator = {"token_mean": sum(lengths), "constant": count * LENGTH}.get(aggregation, count)
    loss = torch.stack(totals).sum() / denominator
    loss.backward()
    return loss.item(), [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def close(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    pairs = [(a, b, TOLERANCE * max(1.0, float(b.abs().max()))) for a, b in zip(one, other, strict=True)]
    return all(torch.allclose(a, b, atol=atol, rtol=1e-3) for a, b, atol in pairs)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_the_update_is_the_definition(aggregation: Aggregation) -> None:
    samples = ragged_samples(10)
    metrics, gradient = update(policy_engine(aggregation, budget=50), [samples[:4], samples[4:]])
    loss, expected = plain_update(aggregation, samples)
    assert metrics["actor/loss"] == pytest.approx(loss, abs=1e-5)
    assert close(gradient, expected)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@settings(max_examples=6, deadline=None)
@given(data=st.data())
def test_loss_and_gradient_do_not_depend_on_the_split(aggregation: Aggregation, data: st.DataObject) -> None:
    samples = ragged_samples(data.draw(st.integers(2, 9)), seed=data.draw(st.integers(0, 99)))
    whole = update(policy_engine(aggregation), [samples])
    shuffled = data.draw(st.permutations(samples))
    cut = data.draw(st.integers(0, len(samples)))
    budget = data.draw(st.integers(1, 120))
    split = update(policy_engine(aggregation, budget=budget), [shuffled[:cut], shuffled[cut:]])
    assert split[0] == pytest.approx(whole[0], abs=1e-5, rel=1e-4)
    assert close(split[1], whole[1])


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "constant"])
def test_a_local_denominator_is_caught(aggregation: Aggregation, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mistake every code base has made once: normalising each micro-batch by itself, then averaging."""
    samples = ragged_samples(9)
    right = update(policy_engine(aggregation), [samples])
    exact = Aggregator.weights

    def local(self: Aggregator, lengths: Sequence[int], device: torch.device) -> torch.Tensor:
        weights_T = exact(self, lengths, device)
        weights_T = torch.ones(sum(lengths)) if weights_T is None else weights_T
        return weights_T / self.denominator(lengths)

    monkeypatch.setattr(Aggregator, "weights", local)
    wrong = update(policy_engine(aggregation, budget=60), [samples])
    assert wrong[0]["actor/loss"] != pytest.approx(right[0]["actor/loss"], rel=1e-2)
    assert not close(wrong[1], right[1])


def test_a_minibatch_too_far_out_is_dropped_and_counted() -> None:
    engine, samples = policy_engine(skip_minibatch_ratio=1.5), ragged_samples(6)
    before = published(engine)
    engine.accumulate(samples)  # behaviour log-probs are random numbers: the mean ratio is far from 1
    metrics = engine.optimizer_step()
    assert metrics["actor/skipped_minibatches"] == 1 and engine.num_updates == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights().items())
    on_policy = [
        sample_with(sample, logprobs) for sample, logprobs in zip(samples, engine.logprobs(samples), strict=True)
    ]
    engine.accumulate(on_policy)
    assert engine.optimizer_step()["actor/skipped_minibatches"] == 0 and engine.num_updates == 1


def test_the_rest_of_a_step_is_dropped_where_asked() -> None:
    engine, samples = policy_engine(skip_minibatch_kl=0.01, skip_rest_of_step=True), ragged_samples(6)
    on_policy = list(map(sample_with, samples, engine.logprobs(samples)))
    taken = []
    for batch in (on_policy, samples, on_policy):
        engine.accumulate(batch)
        taken.append(1 - engine.optimizer_step()["actor/skipped_minibatches"])
    assert taken == [1, 0, 0]
    engine.end_step()
    engine.accumulate(list(map(sample_with, samples, engine.logprobs(samples))))
    assert engine.optimizer_step()["actor/skipped_minibatches"] == 0 and engine.num_updates == 2


def test_the_gradient_norm_is_that_of_minibatches_with_a_gradient() -> None:
    engine, samples = policy_engine(skip_minibatch_kl=0.01, skip_rest_of_step=True), ragged_samples(4)
    closed = []
    for batch in (samples, samples, []):
        engine.accumulate(batch)
        closed.append(engine.optimizer_step())
    assert closed[0]["actor/skipped_minibatches"] == 1, "too far out"
    assert engine.end_step()["actor/grad_norm"] == closed[0]["actor/grad_norm"] > 0


def sample_with(sample: Sample, logprobs: np.ndarray) -> Sample:
    return Sample(
        key=sample.key,
        prompt=sample.prompt,
        segments=(Segment(token_ids=sample.token_ids, logprobs=logprobs),),
        ref_logprobs=sample.ref_logprobs,
        advantages=sample.advantages,
    )


def test_a_gradient_that_is_not_finite_is_dropped() -> None:
    def broken(inputs: LossInputs) -> LossOutputs:
        return LossOutputs(loss_T=inputs.logprobs_T * float("inf"), metrics_T={})

    engine = TrainEngine(tiny_model(), loss=broken, optimizer=OptimizerConfig(), config=TrainConfig())
    before = published(engine)
    engine.accumulate(ragged_samples(2))
    assert engine.optimizer_step()["actor/skipped_minibatches"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights().items())


@pytest.mark.parametrize("gap", [60.0, -100.0])
def test_metrics_of_a_policy_far_from_the_one_that_sampled_are_numbers(gap: float) -> None:
    """Squares of such ratios are all 0, or infinite, in float32."""
    engine, samples = policy_engine(), ragged_samples(3)
    engine.accumulate([sample_with(s, found + gap) for s, found in zip(samples, engine.logprobs(samples), strict=True)])
    metrics = engine.optimizer_step()
    assert np.isfinite([*metrics.values()]).all(), metrics
    assert metrics["actor/ess"] == pytest.approx(1, abs=1e-3), "all ratios are equal"


def test_a_loss_that_is_not_finite_is_dropped_with_its_gradient() -> None:
    """A clipped token has no gradient, whatever its log-prob was."""
    engine, samples = policy_engine(), ragged_samples(3)
    before = published(engine)
    unknown = sample_with(samples[0], np.full(samples[0].num_tokens, np.nan, np.float32))
    engine.accumulate([unknown, *(sample_with(sample, sample.logprobs) for sample in samples[1:])])
    assert engine.optimizer_step()["actor/skipped_minibatches"] == 1
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights().items())


def engine_at(optimizer: OptimizerConfig) -> TrainEngine:
    algorithm = create_algorithm("grpo", {})
    return TrainEngine(tiny_model(), loss=algorithm.loss, optimizer=optimizer, config=TrainConfig())


@pytest.mark.parametrize(("lr", "decay"), [(1e30, 0.0), (1e3, 0.0), (1.0, 1e4)])
def test_an_update_that_would_leave_nothing_of_the_weights_is_dropped(lr: float, decay: float) -> None:
    engine, samples = engine_at(OptimizerConfig(lr=lr, weight_decay=decay)), ragged_samples(3)
    before = published(engine)
    for count in (1, 2):
        engine.accumulate(samples)
        metrics = engine.optimizer_step()
        assert metrics["actor/skipped_minibatches"] == 1 and metrics["actor/failed_updates_in_a_row"] == count
    assert engine.num_updates == 0
    assert all(torch.equal(before[name], tensor) for name, tensor in engine.weights().items())


@pytest.mark.parametrize("lr", [1e-6, 0.05, 1.0])
def test_a_high_learning_rate_is_the_users_affair(lr: float) -> None:
    engine = engine_at(OptimizerConfig(lr=lr))
    engine.accumulate(ragged_samples(3))
    metrics = engine.optimizer_step()
    assert metrics["actor/skipped_minibatches"] == 0 and "actor/failed_updates_in_a_row" not in metrics


def test_failures_in_a_row_end_with_an_update() -> None:
    engine, samples = policy_engine(), ragged_samples(3)
    unknown = sample_with(samples[0], np.full(samples[0].num_tokens, np.nan, np.float32))
    found = []
    for batch in ([unknown], [], [unknown], samples, samples):
        engine.accumulate(batch)
        found.append(engine.optimizer_step().get("actor/failed_updates_in_a_row"))
    assert found == [1, None, 2, 0, None]


def test_an_empty_minibatch_is_no_update() -> None:
    engine = policy_engine()
    engine.accumulate([])
    assert engine.optimizer_step()["actor/skipped_minibatches"] == 1 and engine.num_updates == 0


def test_on_policy_samples_have_ratio_one() -> None:
    engine, samples = policy_engine(), ragged_samples(5)
    on_policy = [
        sample_with(sample, logprobs) for sample, logprobs in zip(samples, engine.logprobs(samples), strict=True)
    ]
    engine.accumulate(on_policy)
    metrics = engine.optimizer_step()
    for name in ("ratio_mean", "ratio_max", "step_ratio_mean", "ess"):
        assert metrics[f"actor/{name}"] == pytest.approx(1, abs=1e-4)
    assert metrics["actor/kl"] == pytest.approx(0, abs=1e-5)
    assert metrics["actor/logprob_gap"] == pytest.approx(0, abs=1e-5)
    assert metrics["actor/clip_fraction"] == 0


def test_what_is_told_of_importance_ratios_is_their_definition() -> None:
    engine, samples = policy_engine(), ragged_samples(5)
    draw = np.random.default_rng(0)
    gaps = [draw.normal(0, 0.5, sample.num_tokens).astype(np.float32) for sample in samples]
    found = zip(samples, engine.logprobs(samples), gaps, strict=True)
    engine.accumulate([sample_with(sample, logprobs - gap) for sample, logprobs, gap in found])
    metrics = engine.optimizer_step()
    log_ratio = np.concatenate(gaps)
    ratio = np.exp(log_ratio)
    expected = {
        "ratio_mean": ratio.mean(),
        "ratio_max": ratio.max(),
        "ess": ratio.sum() ** 2 / (ratio**2).sum() / len(ratio),
        "logprob_gap": abs(log_ratio).mean(),
        "kl": (ratio - 1 - log_ratio).mean(),
    }
    assert {name: metrics[f"actor/{name}"] for name in expected} == pytest.approx(expected, rel=1e-3)


def test_a_run_resumed_from_its_state_goes_on_identically() -> None:
    samples, config = ragged_samples(6), OptimizerConfig(lr=1e-2, warmup_steps=3)

    def engine() -> TrainEngine:
        return TrainEngine(tiny_model(), loss=sft_loss, optimizer=config, config=TrainConfig())

    straight, first = engine(), engine()
    for _ in range(4):
        update(straight, [samples])
    for _ in range(2):
        update(first, [samples])
    second = engine()
    second.model.load_state_dict(first.model.state_dict())
    second.optimizer.load_state_dict(first.optimizer.state_dict())
    for _ in range(2):
        metrics, _ = update(second, [samples])
    assert second.num_updates == 4 and metrics["actor/lr"] == pytest.approx(1e-2)
    for name, tensor in straight.weights().items():
        assert torch.equal(tensor, second.weights()[name]), name


def test_a_checkpoint_is_of_the_moment_it_was_copied_however_late_it_is_written(tmp_path: Path) -> None:
    samples, config = ragged_samples(6), OptimizerConfig(lr=1e-2)

    def engine(model: PreTrainedModel) -> TrainEngine:
        return TrainEngine(model, loss=sft_loss, optimizer=config, config=TrainConfig())

    straight = engine(tiny_model())
    update(straight, [samples])
    copied = straight.copy_to_host(None)
    update(straight, [samples])
    copied.write(tmp_path)
    resumed = engine(AutoModelForCausalLM.from_pretrained(tmp_path))
    resumed.load_optimizer(tmp_path)
    assert resumed.num_updates == 1
    update(resumed, [samples])
    assert all(torch.equal(tensor, resumed.weights()[name]) for name, tensor in straight.weights().items())


def test_samples_that_cannot_be_trained_on_are_named() -> None:
    engine, samples = policy_engine(), ragged_samples(2)
    bare = Sample(key=samples[0].key, prompt=samples[0].prompt, segments=(Segment(token_ids=samples[0].token_ids),))
    with pytest.raises(ValueError, match="without advantages"):
        engine.accumulate([bare])
    mixed = [samples[0], sample_with(samples[1], np.zeros(0, np.float32))]
    with pytest.raises(ValueError, match="no logprobs"):
        engine.accumulate(mixed)
    # Together they have as many as tokens, each in the other's place.
    swapped = [replace(one, advantages=other.advantages) for one, other in permutations(samples)]
    with pytest.raises(ValueError, match=r"tokens and \d+ advantages"):
        engine.accumulate(swapped)


def test_supervised_steps_learn_the_answers() -> None:
    engine = TrainEngine(tiny_model(), loss=sft_loss, optimizer=OptimizerConfig(lr=1e-2), config=TrainConfig())
    samples = [sample_with(sample, np.zeros(0, np.float32)) for sample in ragged_samples(8)]
    losses = [update(engine, [samples])[0]["actor/loss"] for _ in range(30)]
    assert losses[-1] < 0.3 * losses[0]


def test_metrics_of_a_step_add_counts_and_keep_maxima_and_the_last_learning_rate() -> None:
    first = {"actor/grad_norm": 1.0, "actor/skipped_minibatches": 1.0, "actor/ratio_max": 2.0, "actor/lr": 0.1}
    second = {"actor/grad_norm": 3.0, "actor/skipped_minibatches": 1.0, "actor/ratio_max": 5.0, "actor/lr": 0.2}
    reports = [MinibatchReport(metrics=metrics, weights={}) for metrics in (first, second)]
    assert merge_metrics(reports) == {
        "actor/grad_norm": 2.0,
        "actor/skipped_minibatches": 2.0,
        "actor/ratio_max": 5.0,
        "actor/lr": 0.2,
    }


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_means_of_a_step_are_those_of_one_minibatch_of_all_its_samples(aggregation: Aggregation) -> None:
    samples = ragged_samples(7)
    engine = policy_engine(aggregation, skip_minibatch_kl=1e-9)  # all are dropped, so that the weights stay
    for batch in (samples[:1], [], samples[1:]):
        engine.accumulate(batch)
        engine.optimizer_step()
    found = engine.end_step()
    engine.accumulate(samples)
    whole = engine.optimizer_step()
    for name in ("loss", "entropy", "ratio_mean", "logprob_gap", "clip_fraction"):
        assert found[f"actor/{name}"] == pytest.approx(whole[f"actor/{name}"], rel=1e-5), name


def test_small_updates_of_a_bfloat16_model_are_not_lost_in_rounding() -> None:
    algorithm = create_algorithm("grpo", {})
    before = tiny_model().bfloat16()
    engine = TrainEngine(
        before,
        loss=algorithm.loss,
        optimizer=OptimizerConfig(lr=1e-6),
        config=TrainConfig(tokens_per_microbatch=10_000),
    )
    started = published(engine)
    engine.accumulate(ragged_samples(4))
    engine.optimizer_step()
    changed = sum(int((engine.weights()[name] != tensor).sum()) for name, tensor in started.items())
    assert changed > 0.9 * sum(tensor.numel() for tensor in started.values())
