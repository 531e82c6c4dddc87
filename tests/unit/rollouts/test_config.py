"""The recipe's key `episode`: names, settings, and refusals before a run starts."""

from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import Prompt
from interlace.rollouts.base import Session
from interlace.rollouts.by_row import ByRow, check_rows, create_episode
from interlace.rollouts.config import EpisodeConfig, OwnEpisodeConfig, create_kind, episode_names, parse_episode
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.run.recipe.load import load_recipe


class Given:
    def __init__(self, word: str = "none") -> None:
        self.word = word

    async def run(self, prompt: Prompt, session: Session) -> float:
        return len(self.word)


class NotAsync:
    def run(self, prompt: Prompt, session: Session) -> float:
        return 1.0


class NoArguments:
    async def run(self) -> float:
        return 1.0


HERE = "tests.unit.rollouts.test_config"


def parsed(given: object) -> EpisodeConfig:
    config = parse_episode(given)
    assert isinstance(config, EpisodeConfig)
    return config


def row(**columns: str) -> Prompt:
    return Prompt(uid="p", token_ids=np.zeros(1, np.int32), text="", answer="", metadata=columns)


def test_a_recipe_without_the_key_has_single_turns() -> None:
    config = load_recipe("quickstart").episode
    assert config.is_single_turn and isinstance(create_episode(config), SingleTurn)
    assert "single_turn" in episode_names() and "config" not in episode_names()


def test_an_episode_of_ones_own_gets_its_options() -> None:
    config = parsed({"name": f"{HERE}:Given", "options": {"word": "hint"}, "timeout_s": 2})
    made = create_episode(config)
    assert isinstance(made, Given) and made.word == "hint" and config.timeout_s == 2
    assert isinstance(config, OwnEpisodeConfig) and not config.is_single_turn


def test_the_settings_survive_a_run_folder(tmp_path: Path) -> None:
    recipe = load_recipe("quickstart", [f"episode={HERE}:Given", "episode.options.word=a", "episode.max_turns=3"])
    again = type(recipe).model_validate(recipe.model_dump(mode="json"))
    assert again.episode == recipe.episode and isinstance(again.episode, OwnEpisodeConfig)
    assert again.episode.options == {"word": "a"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("single", "unknown episode 'single'. Did you mean 'single_turn'"),
        ({"name": "single_turn", "timeout": 3}, "episode single_turn: unknown key 'timeout'. Did you mean 'timeout_s'"),
        ({"name": 3}, "episode.name = 3: write a name"),
        ({"name": f"{HERE}:Givn"}, "has no 'Givn'. Did you mean 'Given'"),
        ({"column": "agent"}, "set both or none"),
        ({"column": "agent", "others": {"a": {"column": "b", "others": {"c": "single_turn"}}}}, "has `others` as well"),
        (
            {"column": "agent", "others": {"a": {"workers": 2}}},
            "others.a.workers = 2: the processes of episode.workers",
        ),
    ],
)
def test_mistakes_are_named(given: object, message: str) -> None:
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        parse_episode(given)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("NotAsync", {}, "a method `run` that is not an `async def`"),
        ("NoArguments", {}, r"cannot be run as run\(prompt, session\)"),
        ("Given", {"wrd": "x"}, r"cannot be made with \(wrd='x'\)"),
        ("HERE", {}, "is a str, not a class with `run`"),
    ],
)
def test_a_class_that_is_no_episode_is_refused(name: str, options: dict[str, str], message: str) -> None:
    config = parsed({"name": f"{HERE}:{name}", "options": options})
    with pytest.raises(UserError, match=message):
        create_kind(config).check()


def test_a_row_chooses_its_episode() -> None:
    own = {"name": f"{HERE}:Given", "options": {"word": "hint"}}
    config = parsed({"column": "agent", "others": {"guess": own}})
    assert not config.is_single_turn and isinstance(create_episode(config), ByRow)
    check_rows(config, [row(agent="guess"), row()])
    with pytest.raises(UserError, match=r"names the episode 'gess' in its column 'agent'. Did you mean 'guess'"):
        check_rows(config, [row(agent="gess")])
