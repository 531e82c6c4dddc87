"""Real kills and stops of processes, and the certificate of the run."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from tests.support.training import SMALL


def certificate(tmp_path: Path, faults: str, *settings: str) -> dict[str, object]:
    given = [*SMALL, f"model.cache_dir={tmp_path / 'cache'}", *settings]
    ended = CliRunner().invoke(app, ["chaos", "quickstart", *given, "--faults", faults, "--json"])
    assert ended.exit_code == 0, ended.output
    found: dict[str, object] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_killed_and_stopped_reward_processes_change_nothing(tmp_path: Path) -> None:
    found = certificate(tmp_path, "kill:reward@1/step", "reward.workers=2")
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)


@pytest.mark.slow
def test_killed_engines_change_nothing(tmp_path: Path) -> None:
    found = certificate(tmp_path, "kill:rollout@1/step", "rollout=interlace", "warmup=null")
    assert found["injected"] == found["survived"] and found["injected"]
    assert (found["lost"], found["duplicated"], found["weights_equal"]) == (0, 0, True)
