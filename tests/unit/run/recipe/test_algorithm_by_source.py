"""Algorithms of single sources of a mixture: the loss of their rows, and combinations that are refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from interlace.algorithms import Algorithm, create_algorithm
from interlace.core.errors import UserError
from interlace.core.training import LossInputs
from interlace.core.types import Sample
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine
from interlace.run.recipe.check_settings import check_settings
from interlace.run.recipe.config import Recipe, algorithm_of
from tests.unit.algorithms.groups import LENGTHS, loss_inputs
from tests.unit.engines.train.models import ragged_samples, tiny_model
from tests.unit.run.recipe.test_config import SMALLEST

SOURCES = ("a", "b", "a", "b")
OWN = {"a": {"name": "rloo", "aggregation": "token_mean", "kl_coefficient": 0.1}, "b": {"name": "cispo"}}


def recipe(*algorithms: object, **changes: object) -> Recipe:
    """Returns a recipe with a source for each algorithm, named a, b, ..."""
    sources = [
        {"source": "chain_sum", "name": name, "algorithm": own} for name, own in zip("abc", algorithms, strict=False)
    ]
    return Recipe.parse({**SMALLEST, "task": sources, **changes})


def alone(source: str) -> Algorithm:
    settings = dict(OWN[source])
    return create_algorithm(settings.pop("name"), settings)


def of_source(inputs: LossInputs, source: str) -> tuple[LossInputs, torch.Tensor]:
    """Returns the inputs of a run with one source: its samples, and the columns of its algorithm."""
    kept_N = torch.tensor([each == source for each in SOURCES])
    kept_T = kept_N.repeat_interleave(torch.tensor(LENGTHS))
    values = {
        name: getattr(inputs, name)[kept_T]
        for name in ("logprobs_T", "entropy_T", "behaviour_logprobs_T", "proximal_logprobs_T", "advantages_T", "mask_T")
    }
    reference_T = inputs.ref_logprobs_T
    lengths = [length for length, kept in zip(LENGTHS, kept_N, strict=True) if kept]
    own = replace(
        inputs,
        **values,
        ref_logprobs_T=reference_T[kept_T] if reference_T is not None and source == "a" else None,
        sample_T=torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths)),
        num_samples=len(lengths),
    )
    return own, kept_T


def test_each_row_has_the_loss_of_its_own_algorithm() -> None:
    inputs = replace(loss_inputs(with_reference=True), sources_N=SOURCES)
    found = algorithm_of(recipe(*OWN.values())).loss(inputs)
    clipped = []
    for source in OWN:
        own, kept_T = of_source(inputs, source)
        expected = alone(source).loss(own)
        torch.testing.assert_close(found.loss_T[kept_T], expected.loss_T)
        clipped.append(expected.metrics_T["clip_fraction"])
        if source == "a":
            [penalties] = [metrics["ref_kl"] for metrics in found.partial_metrics if "ref_kl" in metrics]
            assert torch.equal(penalties, expected.metrics_T["ref_kl"])
    shares = [metrics["clip_fraction"] for metrics in found.partial_metrics if metrics]
    assert torch.equal(torch.cat(shares), torch.cat(clipped))


def test_rows_of_one_source_are_trained_as_by_its_algorithm_alone() -> None:
    inputs = replace(loss_inputs(with_reference=True), sources_N=("a",) * 4)
    found, expected = (each.loss(inputs) for each in (algorithm_of(recipe(*OWN.values())), alone("a")))
    assert torch.equal(found.loss_T, expected.loss_T) and found.metrics_T.keys() == expected.metrics_T.keys()


def test_an_update_does_not_depend_on_the_micro_batches() -> None:
    samples = [_of_source(sample, "ab"[number % 2]) for number, sample in enumerate(ragged_samples(8))]
    algorithm = algorithm_of(recipe(*OWN.values()))
    closed = []
    for budget in (10_000, 40):
        engine = TrainEngine(
            tiny_model(),
            loss=algorithm.loss,
            optimizer=OptimizerConfig(),
            config=TrainConfig(update=algorithm.settings, tokens_per_microbatch=budget),
        )
        engine.accumulate(samples)
        closed.append(engine.optimizer_step())
    assert closed[0] == pytest.approx(closed[1], rel=1e-4, abs=1e-6)
    assert closed[0]["actor/ref_kl"] > 0


def _of_source(sample: Sample, source: str) -> Sample:
    return replace(sample, prompt=replace(sample.prompt, source=source))


def test_statistics_of_the_batch_are_of_the_algorithms_own_rows() -> None:
    """Equal algorithms of two sources count as one."""
    algorithm = algorithm_of(recipe("reinforce_pp", "grpo", "reinforce_pp", algorithm="grpo"))
    samples = [_of_source(sample, "abc"[number % 3]) for number, sample in enumerate(ragged_samples(9))]
    found = algorithm.batch_advantages(samples)
    own = [place for place in range(9) if place % 3 != 1]
    expected = create_algorithm("reinforce_pp", {}).batch_advantages([samples[place] for place in own])
    for place, advantages in zip(own, expected, strict=True):
        assert np.array_equal(found[place], advantages)
    assert algorithm.needs.batch_statistics and found[1] is samples[1].advantages


def test_settings_without_a_name_change_the_recipes_algorithm() -> None:
    found = recipe(
        {"clip_high": 0.3}, {"name": "maxrl"}, algorithm={"name": "cispo", "refill_rounds": 3, "clip_low": 0.1}
    )
    first, second = (source.algorithm for source in found.task.mixture)
    assert first is not None and second is not None
    assert (first.name, second.name) == ("cispo", "maxrl")
    assert first.settings.model_dump() == {**found.algorithm.settings.model_dump(), "clip_high": 0.3}
    assert second.settings.refill_rounds == 3  # of the whole step
    assert Recipe.parse(found.model_dump(mode="json")) == found


def test_the_first_algorithm_is_the_recipes_if_all_sources_name_one() -> None:
    assert recipe("dapo", "maxrl").algorithm.name == "dapo"
    changed = recipe("dapo", {"clip_high": 0.3})
    assert changed.algorithm.name == "grpo"
    assert [source.algorithm and source.algorithm.name for source in changed.task.mixture] == ["dapo", "grpo"]


@pytest.mark.parametrize(
    ("algorithms", "words"),
    [
        (("grop", "grpo"), "unknown algorithm 'grop'.*'grpo'"),
        (("grpo", {"clip_hihg": 1}), "unknown key 'clip_hihg'.*'clip_high'"),
        (("grpo", "ppo"), "'ppo' of the source 'b' .*'ppo' needs a critic .*'grpo' needs none"),
        (("ppo", "grpo"), "'grpo' of the source 'b' .*'ppo' needs a critic .*'grpo' needs none"),
        (("grpo", "prime"), "'prime' needs a process reward model"),
        (("grpo", "remax"), "'remax' needs a greedy response"),
        (("grpo", "sac"), "'sac' of the source 'b' trains from a replay"),
        (("grpo", "dpo"), "'dpo' of the source 'b' trains on given rows"),
        (("sft", "grpo"), "'sft' .*trains on given rows"),
        (("grpo", "gspo"), "'gspo' of the source 'b' has aggregation=seq_mean_token_mean.*'grpo' has .*=token_mean"),
        (("grpo", {"skip_minibatch_kl": 0.1}), "'b' has skip_minibatch_kl=0.1.* has skip_minibatch_kl=None"),
        (("grpo", {"name": "grpo", "kl_coefficient": 0.1}, "distill"), "'c' learns from a teacher.*of 'b' has a KL"),
    ],
)
def test_algorithms_that_cannot_train_together_are_refused(algorithms: tuple[object, ...], words: str) -> None:
    with pytest.raises(UserError, match=words):
        recipe(*algorithms)


def test_a_reward_below_an_algorithms_bound_is_raised_in_its_source() -> None:
    source = {"source": "chain_sum", "algorithm": "maxrl"}
    reward = {"name": "exact", "correct": 5, "incorrect": -5}
    with pytest.raises(UserError, match=r"source 'chain_sum', such as reward: ({name: exact, .* incorrect: 0})"):
        check_settings(Recipe.parse({**SMALLEST, "task": [{**source, "reward": reward}]}))
    check_settings(Recipe.parse({**SMALLEST, "task": [{**source, "reward": {**reward, "correct": 1, "incorrect": 0}}]}))
