"""Real kills and stops of processes, and the certificate of the run."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from tests.support.robots import SMALL as ROBOT
from tests.support.training import SMALL


def certificate(
    tmp_path: Path, faults: str, *settings: str, recipe: str = "quickstart", base: Sequence[str] = SMALL
) -> dict[str, object]:
    given = [*base, f"model.cache_dir={tmp_path / 'cache'}", *settings]
    ended = CliRunner().invoke(app, ["chaos", recipe, *given, "--faults", faults, "--json"])
    assert ended.exit_code == 0, ended.output
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_killed_and_stopped_reward_processes_change_nothing(tmp_path: Path) -> None:
    found = certificate(tmp_path, "kill:reward@1/step", "reward.workers=2")
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.slow
def test_faults_come_in_the_phases_that_they_are_aimed_at(tmp_path: Path) -> None:
    phases = ("prefill", "decode", "scoring", "update", "publication", "checkpoint", "evaluation", "idle")
    settings = ("reward.workers=2", "steps=6", "checkpoint_every=1", "eval_every=2", "warmup=null")
    found = certificate(tmp_path, ",".join(f"kill:reward@0.5/{phase}" for phase in phases), *settings)
    struck = {row["fault"]: row["phase"] for row in found["faults"]}  # type: ignore[attr-defined]
    assert all(fault.endswith(f"/{phase}") for fault, phase in struck.items()) and len(struck) >= 5
    assert found["by_phase"] == {"reward": Counter(row["phase"] for row in found["faults"])}  # type: ignore[attr-defined]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.slow
def test_killed_engines_change_nothing(tmp_path: Path) -> None:
    found = certificate(tmp_path, "kill:rollout@1/step", "rollout=interlace", "warmup=null")
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.slow
def test_killed_episode_processes_change_nothing(tmp_path: Path) -> None:
    episode = ("episode.name=tests.support.worker_episodes:ThreeTurns", "episode.workers=2", "warmup=null", "steps=8")
    found = certificate(tmp_path, "kill:episode@0.5/step", *episode)
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.slow
def test_killed_simulators_change_nothing(tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    robot = ("episode.env.workers=2", "steps=6")
    found = certificate(tmp_path, "kill:env@1/step", *robot, recipe="robot-cartpole", base=ROBOT)
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.slow  # starts its ranks twice or more
def test_killed_trainer_ranks_change_nothing(tmp_path: Path) -> None:
    trainer = ("actor.ranks=2", "warmup=null", "steps=6", "checkpoint_every=2")
    found = certificate(tmp_path, "kill:actor@0.3/step", *trainer)
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.slow  # starts Ray twice, and ranks again and again
@pytest.mark.ray
def test_killed_and_stopped_ranks_on_ray_change_nothing(tmp_path: Path) -> None:
    ray = ("cluster.backend=ray", "algorithm.kl_coefficient=0.1", "reward.workers=1", "warmup=null", "steps=8")
    faults = ",".join(f"{kind}:{role}@0.2/step" for kind in ("kill", "stop") for role in ("rollout", "reference"))
    found = certificate(tmp_path, f"{faults},stop:reward@0.2/step", *ray)
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.parametrize(
    ("fault", "sentence"),
    [("kill:actor@1s", "Set actor.ranks=2"), ("kill:critic@1s", "has no critic")],
)
def test_a_fault_of_a_trainer_without_processes_is_refused(fault: str, sentence: str) -> None:
    ended = CliRunner().invoke(app, ["chaos", "quickstart", "--faults", fault])
    assert ended.exit_code == 2
    assert sentence in ended.output
