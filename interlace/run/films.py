"""Films of held-out episodes: their choice by outcome, and their files for the report and TensorBoard."""

from collections.abc import Mapping, Sequence

import numpy as np

from interlace.core.random import stable_hash
from interlace.core.types import RewardResult
from interlace.observe.films import show_in_tensorboard, write_films
from interlace.observe.run_folder import RunFolder
from interlace.robots.episodes.robot import EPISODE_LENGTH, RETURN
from interlace.rollouts.base import Filming

BEST, WORST, FAILURE = "best", "worst", "random failure"
"""Labels of the chosen episodes."""


def choose_films(results: Sequence[RewardResult], are_right: Sequence[bool], seed: int) -> Mapping[int, str]:
    """Chooses the best and the worst episode, and a further one at random among those without success.

    Episodes are ordered by success, then by return, then by length, the shorter first. The random one depends on the
    seed and on the set of failures. An episode that failed with an error is not chosen. Returns the label of each
    chosen index; fewer than three if there are not enough episodes.
    """
    played = [place for place, result in enumerate(results) if result.failure is None]
    if not played:
        return {}

    def rank(place: int) -> tuple[bool, float, float]:
        parts = results[place].parts
        returned = parts.get(RETURN, results[place].reward)
        return are_right[place], returned, -parts.get(EPISODE_LENGTH, 0.0)

    best = max(played, key=rank)
    others = [place for place in played if place != best]
    chosen = {best: BEST} | ({min(others, key=rank): WORST} if others else {})
    failed = [place for place in played if not are_right[place] and place not in chosen]
    if failed:
        noise = np.random.default_rng(stable_hash("random failure", seed, *failed))
        chosen[failed[int(noise.integers(len(failed)))]] = FAILURE
    return chosen


def keep_films(filming: Filming | None, folder: RunFolder, step: int, loggers: Sequence[str] | None) -> str:
    """Writes the films of an evaluation's episodes. Returns a sentence if a film is missing.

    loggers: the recipe's loggers; if they include TensorBoard, it gets the contact sheet.
    """
    films = filming.films() if filming else ()
    if not films:
        reason = filming.why_no_films() if filming else ""
        return f"no videos: {reason}" if reason else ""
    if loggers is None or "tensorboard" in loggers:
        show_in_tensorboard(folder.path, step, films)
    return write_films(folder.videos, step, films)
