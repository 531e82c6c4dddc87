"""The environment of docs/extending.md runs through the package's vector of environments."""

import re
from pathlib import Path

import numpy as np
import pytest
import yaml

from interlace.robots.envs.load import EnvConfig, create_envs
from interlace.robots.replay.buffer import ReplayLearnerConfig

DOCS = Path(__file__).parents[4] / "docs"


def test_an_environment_of_ones_own_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (DOCS / "extending.md").read_text(encoding="utf-8")
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "# walk.py" in block]
    (recipe,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "walk:Walk" in block]
    (tmp_path / "walk.py").write_text(code, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = EnvConfig.parse(yaml.safe_load(recipe)["env"])
    envs = create_envs(config.family, config.settings, config.num_envs)
    envs.reset(seeds=[0] * 8, task_ids=[0] * 8, init_state_ids=range(8))
    for _ in range(20):
        states = envs.observe()["state"]
        result = envs.chunk_step(np.repeat(np.sign(states[:, 1:] - states[:, :1])[:, None], 2, axis=1))
    assert result.success.all() and envs.spec.instructions == ("walk to the goal",)


def test_settings_that_the_page_names_are_there() -> None:
    pytest.importorskip("metaworld")
    text = (DOCS / "robots.md").read_text(encoding="utf-8")
    (section,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if block.startswith("env:\n")]
    config = EnvConfig.parse(yaml.safe_load(section)["env"])
    assert create_envs(config.family, config.settings, 1).spec.tasks == ("reach-v3", "push-v3")


def test_the_replay_that_the_page_shows_is_valid() -> None:
    text = (DOCS / "robots.md").read_text(encoding="utf-8")
    (block,) = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "learner: imitation" in block]
    learners = [ReplayLearnerConfig.parse(yaml.safe_load(line)["replay"]).learner for line in block.splitlines()]
    assert learners == ["imitation", "policy_gradient", "actor_critic"]
