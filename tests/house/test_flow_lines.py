"""Each line of the policy flow has a docstring that states its input, its output, and its wait."""

import ast
import inspect
from collections.abc import Callable

import pytest

from interlace.flows import policy
from interlace.flows.replay import ReplayRole
from interlace.flows.roles import CriticRole, ReferenceRole, RewardRole, RolloutRole
from interlace.flows.run import PolicyRun
from interlace.stages.train import SkippedStage, TrainStage

ROLES = {
    "rollout": [RolloutRole],
    "reward": [RewardRole],
    "reference": [ReferenceRole],
    "critic": [CriticRole],
    "actor": [TrainStage, SkippedStage],
    "replay": [ReplayRole],
}
LABELS = ("Consumes: ", "Produces: ", "Waits for: ", "Released by: ")


def called_methods() -> list[Callable[..., object]]:
    """Methods that the flow calls on the run and on its roles."""
    found: list[Callable[..., object]] = []
    for node in ast.walk(ast.parse(inspect.getsource(policy.policy_optimization))):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        match ast.unparse(node.func).split("."):
            case ["run", method]:
                found.append(getattr(PolicyRun, method))
            case ["run", role, method]:
                found += [getattr(kind, method) for kind in ROLES[role]]
    return found


@pytest.mark.parametrize("method", called_methods(), ids=lambda method: method.__qualname__)
def test_each_line_states_input_output_and_wait(method: Callable[..., object]) -> None:
    lines = [line.strip() for line in (method.__doc__ or "").splitlines()]
    assert [label for label in LABELS if any(line.startswith(label) for line in lines)] == [*LABELS]
