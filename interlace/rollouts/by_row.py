"""Mixtures of episodes: a column of the data selects the episode of each row."""

from collections.abc import Iterable, Mapping

from interlace.core.errors import UserError, nearest
from interlace.core.types import JSON, Prompt
from interlace.observe.films import Film
from interlace.rollouts.base import Closing, Episode, Filming, Outcome, Session
from interlace.rollouts.config import EpisodeConfig, create_kind


def create_episode(config: EpisodeConfig) -> Episode:
    """Creates the object that runs the episodes of a recipe. Raises UserError for settings that cannot work."""
    main = create_kind(config).create()
    if config.column is None:
        return main
    others = {label: create_kind(other).create() for label, other in config.others.items()}
    return ByRow(config.column, main, others)


def config_of(config: EpisodeConfig, row: Mapping[str, JSON], where: str) -> EpisodeConfig:
    """Returns the settings of the episode of a row. row: metadata of the row. where: place of the row, for the message.

    Raises UserError if the row names an unknown episode.
    """
    label = read_label(config.column, row)
    if not label:
        return config
    if label not in config.others:
        raise UserError(
            f"{where} names the episode {label!r} in its column {config.column!r}."
            f"{nearest(label, config.others)} Add it to episode.others, or correct the row."
        )
    return config.others[label]


def check_rows(config: EpisodeConfig, prompts: Iterable[Prompt]) -> None:
    """Raises UserError if a row names an unknown episode."""
    if config.column is not None:
        for prompt in prompts:
            config_of(config, prompt.metadata, f"prompt {prompt.uid}")


class ByRow:
    """Runs the episode that the column of a row names, or the main episode if the column is empty or missing."""

    def __init__(self, column: str, main: Episode, others: Mapping[str, Episode]) -> None:
        self._column, self._main, self._others = column, main, others

    async def run(self, prompt: Prompt, session: Session) -> Outcome | float | None:
        label = read_label(self._column, prompt.metadata)
        return await (self._others[label] if label else self._main).run(prompt, session)

    def films(self) -> list[Film]:
        return sorted((film for one in self._filming for film in one.films()), key=lambda film: film.name)

    def why_no_films(self) -> str:
        return next((reason for one in self._filming if (reason := one.why_no_films())), "")

    def close(self) -> None:
        for one in (self._main, *self._others.values()):
            if isinstance(one, Closing):
                one.close()

    @property
    def _filming(self) -> list[Filming]:
        return [one for one in (self._main, *self._others.values()) if isinstance(one, Filming)]


def read_label(column: str | None, row: Mapping[str, JSON]) -> str:
    """Returns the name of a row's episode among `others`; empty for the main episode."""
    value = row.get(column) if column is not None else None
    return "" if value is None else str(value)
