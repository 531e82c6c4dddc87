"""Algorithms are found by name, and declare their needs."""

import pytest

from interlace.algorithms import Algorithm, Needs, algorithm_names, create_algorithm
from interlace.algorithms.grpo import GRPO
from interlace.core.errors import UserError

NAMES = [
    *("cispo", "dapo", "dppo", "dr_grpo", "grpo", "gspo", "maxrl", "ppo", "prime"),
    *("reinforce_pp", "reinforce_pp_baseline", "remax", "rloo", "sapo"),
]


class Mine(GRPO):
    """A user's own."""


class Bare(GRPO):
    """Takes no settings."""

    def __init__(self) -> None:
        raise NotImplementedError


def test_names() -> None:
    assert algorithm_names() == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_is_made_from_its_name(name: str) -> None:
    algorithm = create_algorithm(name, {"skip_minibatch_ratio": 2.0})
    assert isinstance(algorithm, Algorithm) and algorithm.settings.skip_minibatch_ratio == 2.0


def test_needs_are_declared() -> None:
    needs = {name: create_algorithm(name, {}).needs for name in NAMES}
    assert needs["grpo"] == Needs()
    assert needs["ppo"] == Needs(critic=True, batch_statistics=True)
    assert needs["remax"] == Needs(greedy_baseline=True)
    assert needs["prime"] == Needs(process_reward=True, reference=True)
    assert {name for name in NAMES if needs[name].batch_statistics} == {"ppo", "reinforce_pp", "reinforce_pp_baseline"}
    assert create_algorithm("grpo", {"kl_coefficient": 0.1}).needs.reference
    alone = {name for name in NAMES if not create_algorithm(name, {}).is_group_relative}
    assert alone == {"ppo", "reinforce_pp", "remax"}


def test_a_users_own() -> None:
    found = create_algorithm("tests.unit.algorithms.test_load:Mine", {"clip_high": 0.3})
    assert type(found).__name__ == "Mine"


@pytest.mark.parametrize(
    ("spec", "settings", "said"),
    [
        ("grop", {}, "Did you mean 'grpo'"),
        ("policy", {}, "unknown algorithm"),
        ("grpo", {"clip_hgh": 1}, "Did you mean 'clip_high'"),
        ("grpo", {"clip_high": -1}, "clip_high = -1"),
        ("dapo", {"clip_high": -1}, "clip_high = -1"),
        ("gspo", {"clip_low": -1}, "clip_low = -1"),
        ("cispo", {"clip_high": -1}, "clip_high = -1"),
        # What an algorithm's own loss would pass over is no setting of it.
        *((name, {"dual_clip": 3}, "dual_clip = 3 bounds PPO's clipped loss") for name in ("cispo", "sapo", "dppo")),
        *(
            (name, {"ratio_of": "turn"}, "ratio_of = 'turn' sets the unit")
            for name in ("gspo", "rloo", "cispo", "dppo")
        ),
        ("grpo", {"kl_coefficient": 0.1, "kl_estimator": "k1"}, "gradient of k1 does not depend on the reference"),
        ("distill", {"signal": "loss", "kl_estimator": "k1"}, "gradient of k1 does not depend on the teacher"),
        ("grpo", {"off_policy": {"high": 3.0}}, "high = 3.0 has no effect .* set correction to 'truncate' or 'mask'"),
        ("grpo", {"off_policy": {"interpolation": 0.9}}, "interpolation = 0.9 has no effect .* set proximal"),
        ("grpo", {"aggregation_length": 1024}, "aggregation_length = 1024 is of aggregation 'constant'"),
        ("grpo", {"skip_rest_of_step": True}, "no limit drops one"),
        ("distill", {"teacher_top_k": 4}, "teacher_top_k = 4 is of signal 'top_k' and has no effect"),
        ("dppo", {"clip_high": 0.28}, "set max_loss and max_gain"),
        ("math:sqrt", {}, "not a subclass"),
        (f"{__name__}:Bare", {}, r"is made as Bare\(settings\), which fails"),
        ("interlace.algorithms.policy:PolicyAlgorithm", {}, "lacks advantages: define it"),
    ],
)
def test_mistakes_are_named(spec: str, settings: dict[str, object], said: str) -> None:
    with pytest.raises(UserError, match=said):
        create_algorithm(spec, settings)
