"""Results of environments of `verifiers` become rewards and metrics of a sample."""

import sys
import types

import pytest

from interlace.agents.episodes.environment import average_metrics, is_fault, select_numbers
from interlace.core.errors import UserError
from interlace.rollouts.base import Outcome
from interlace.rollouts.config import create_kind, parse_episode
from interlace.rollouts.generate import outcome_of


def test_metrics_of_verifiers_may_have_the_names_of_metrics_of_all_rewards() -> None:
    """Each sample failed with the advice to rename the metric, which belongs to another package."""
    parts = select_numbers({"mean": 2.0, "num_turns": 1.0, "max": None})
    assert outcome_of(Outcome(reward=1.0, parts=parts)).parts == {"metric_mean": 2.0, "num_turns": 1.0}


@pytest.mark.parametrize(
    ("error", "num_turns", "expected"),
    [(None, 2, False), ("SandboxError", 2, True), ("ToolCallError", 2, False), ("ModelError", 0, True)],
)
def test_a_rollout_whose_sandbox_failed_has_no_reward(error: str | None, num_turns: int, expected: bool) -> None:
    """A sandbox of verifiers 0.3 that failed after the first turn gave the sample the reward 0."""
    assert is_fault(None if error is None else {"error": error}, num_turns) == expected


def test_metrics_that_several_agents_have_are_averaged() -> None:
    """The metric of the last agent replaced the others."""
    found = average_metrics([{"num_turns": 1.0, "calls": 3.0}, {"num_turns": 4.0}])
    assert found == {"num_turns": 2.5, "calls": 3.0}


def test_a_version_of_verifiers_without_a_known_interface_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("verifiers")
    package.__version__ = "0.9.1"  # type: ignore[attr-defined]
    package.__path__ = []
    monkeypatch.setitem(sys.modules, "verifiers", package)
    monkeypatch.delitem(sys.modules, "verifiers.v1", raising=False)
    with pytest.raises(UserError, match=r"verifiers 0\.9\.1 is installed"):
        create_kind(parse_episode({"name": "environment", "verifiers": "own-sums"})).create()
