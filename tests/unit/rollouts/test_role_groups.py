"""The operations that flows and stages call exist on the workers, with the same arguments and results."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import get_type_hints

import pytest

from interlace.core.row import FlowRow, is_row
from interlace.core.types import Request, Sample
from interlace.engines.rollout.protocol import EngineReport
from interlace.forecast.costs.episodes import SimulatedSimulators
from interlace.forecast.costs.rollout import SimulatedEngine
from interlace.forecast.costs.workers import SimulatedInference, SimulatedReward, SimulatedTrainer
from interlace.robots.env_worker import EnvWorker
from interlace.rollouts import role_groups
from interlace.rollouts.role_groups import (
    ActorGroup,
    CriticGroup,
    EnvGroup,
    ReferenceGroup,
    RewardGroup,
    RolloutGroup,
    TrainedGroup,
)
from interlace.runtime.group import TypedGroup
from interlace.runtime.worker import Worker, operation_of
from interlace.workers.actor import ActorCriticWorker, ActorWorker
from interlace.workers.critic import CriticWorker, ProcessRewardWorker
from interlace.workers.reference import ReferenceWorker
from interlace.workers.reward import RewardModelWorker, RewardWorker
from interlace.workers.rollout import RolloutWorker
from interlace.workers.scoring import ScoringWorker
from interlace.workers.trained import TrainedWorker

ROOT = Path(__file__).parents[3]
PAIRS: tuple[tuple[type[TypedGroup], type[Worker]], ...] = (
    (RolloutGroup, RolloutWorker),
    (RolloutGroup, SimulatedEngine),
    (EnvGroup, EnvWorker),
    (EnvGroup, SimulatedSimulators),
    (RewardGroup, RewardWorker),
    (RewardGroup, RewardModelWorker),
    (RewardGroup, SimulatedReward),
    (ReferenceGroup, ReferenceWorker),
    (ReferenceGroup, ScoringWorker),
    (ReferenceGroup, SimulatedInference),
    (TrainedGroup, TrainedWorker),
    (ActorGroup, ActorWorker),
    (ActorGroup, ActorCriticWorker),
    (ActorGroup, SimulatedTrainer),
    (CriticGroup, CriticWorker),
    (CriticGroup, ProcessRewardWorker),
)
LEFT_OUT: dict[type[Worker], set[str]] = {
    ActorWorker: {"learn"},
    CriticWorker: {"process_rewards"},
    ProcessRewardWorker: {"values"},
    ScoringWorker: {"top_logprobs"},
    SimulatedEngine: {"health", "report", "weight_place"},
    SimulatedInference: {"attention"},
    SimulatedTrainer: {
        "accumulate_replayed", "learn", "attention", "base_logprobs", "checkpoint_bytes", "copy_checkpoint", "evaluate",
        "load_optimizer", "open_weights", "weight_place", "write_checkpoint",
    },
}  # fmt: skip
"""Operations that no run asks of this worker."""
NAMES = {**vars(role_groups), "EngineReport": EngineReport}


@pytest.mark.parametrize(("group", "worker"), PAIRS)
def test_a_roles_operations_are_those_of_its_worker(group: type[TypedGroup], worker: type[Worker]) -> None:
    names = {name for cls in group.__mro__ if cls.__module__ == role_groups.__name__ for name in vars(cls)}
    called = {name for name in names if not name.startswith("_")}
    assert {name for name in called if not operation_of(worker, name)} == LEFT_OUT.get(worker, set())
    for name in called - LEFT_OUT.get(worker, set()):
        promised, done = getattr(group, name), getattr(worker, name)
        assert inspect.signature(promised).parameters.keys() == inspect.signature(done).parameters.keys(), name
        said, does = get_type_hints(promised, NAMES), get_type_hints(done, {**done.__globals__, **NAMES})
        (result,) = said.pop("return").__args__
        each, how = does.pop("return"), operation_of(worker, name)
        assert result == (list[each] if how and how.collect == "all" else each), name  # type: ignore[valid-type]
        assert {key: str(hint) for key, hint in said.items()} == {key: str(hint) for key, hint in does.items()}, name


WRONG = """
from interlace.core.row import FlowRow
from interlace.core.types import Request, Sample
from interlace.rollouts.role_groups import ActorGroup, RewardGroup, RolloutGroup


async def flow(actor: ActorGroup, rollout: RolloutGroup) -> int:
    await actor.accumulate("samples")
    await rollout.inline(RolloutGroup.serve, [])
    rollout.notify(RewardGroup.score, [])
    await actor.optimiser_step()
    return await actor.step_metrics()


def rows(sample: Sample, request: Request) -> tuple[FlowRow, FlowRow]:
    return sample, request
"""


def test_a_wrong_call_of_an_operation_is_a_type_error(tmp_path: Path) -> None:
    (tmp_path / "wrong.py").write_text(WRONG, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml"), str(tmp_path / "wrong.py")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    errors = [line.partition("error: ")[2] for line in done.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 5, done.stdout + done.stderr
    assert errors[0].startswith('Argument 1 to "accumulate" of "TrainedGroup" has incompatible type "str"')
    assert "inline" in errors[1] and "notify" in errors[2], errors
    assert errors[3].startswith('"ActorGroup" has no attribute "optimiser_step"')
    assert errors[4].startswith("Incompatible return value type")


def test_samples_and_requests_are_rows_and_other_arguments_are_none() -> None:
    rows: tuple[type[FlowRow], ...] = (Sample, Request)
    assert all(hasattr(row, name) for row in rows for name in ("num_tokens", "num_prompt_tokens"))
    assert not is_row({"uid": 1}) and not is_row(7) and not is_row("text")
