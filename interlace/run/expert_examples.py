"""Demonstrations of a robot's expert or of a data set, as samples to imitate."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import PROMPT, IntArray, Prompt, Sample, SampleKey, Segment
from interlace.models.action_tokens import ActionTokens
from interlace.models.inputs import STATE
from interlace.robots.envs.fleet import read_spec
from interlace.robots.episodes.robot import RobotConfig, RobotEpisode, policy_actions
from interlace.robots.experts import Demonstrated, ExpertConfig, demonstrate, first_of_each_instruction
from interlace.rollouts.envs.spec import Observation
from interlace.run.host import policy_actions_of
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import with_instructions


@dataclass(frozen=True, slots=True)
class ExpertExamples:
    """Pairs of a state and the expert's next chunk, drawn by (seed, step)."""

    shown: Sequence[Demonstrated]
    episode: RobotEpisode
    actions: ActionTokens
    batch_size: int
    seed: int

    def batch(self, step: int) -> Sequence[Sample]:
        draw = np.random.default_rng(stable_hash("imitation", self.seed, step))
        places = draw.integers(len(self.shown), size=self.batch_size)
        return [self._make_sample(self.shown[place], draw) for place in places]

    def _make_sample(self, shown: Demonstrated, draw: np.random.Generator) -> Sample:
        is_apart = self.actions.leads is not None  # then the observation is part of the prompt
        put_in = self.actions.context(shown.prompt.token_ids.tolist()) if is_apart else self.actions.placeholders
        answer = self.actions.encode(shown.actions, draw)
        queries: IntArray | None = np.asarray(self.actions.query_ids, np.int32) if self.actions.query_ids else None
        sensed = Segment(
            parent=None if is_apart else PROMPT,
            token_ids=np.asarray(put_in, np.int32),
            sampled=np.zeros(len(put_in), np.bool_),
            inputs=self.episode.inputs(shown.observation, self.actions),
        )
        return Sample(
            key=SampleKey(0, 0),
            prompt=shown.prompt,
            segments=(sensed, Segment(parent=0, token_ids=answer, query_ids=queries)),
            advantages=np.ones(len(put_in) + len(answer), np.float32),
        )


async def make_expert_examples(
    recipe: Recipe, prompts: Sequence[Prompt], section: str, experts: ExpertConfig, batch_size: int
) -> ExpertExamples:
    """Records or reads demonstrations, and returns them as samples.

    section: key of the settings `experts`. batch_size: samples of a batch. Raises UserError if the recipe's episodes
    are not a robot's, or the data set is of another robot.
    """
    episode = recipe.episode
    if not isinstance(episode, RobotConfig):
        raise UserError(
            f"{section} are a simulator's, and episode {episode.name!r} has none. Take warmup.demonstrations, or "
            "episode.name=robot."
        )
    actions = policy_actions(policy_actions_of(recipe))
    asked = first_of_each_instruction(with_instructions(recipe, prompts))
    shown = await demonstrate(experts, episode.env, asked, actions.chunk, recipe.seed, section=section)
    if experts.dataset is not None:
        first = shown[0]
        setting = f"{section}.dataset={experts.dataset}"
        check_recorded_arrays(setting, first.observation, first.actions.shape[1], episode, actions)
    return ExpertExamples(shown, RobotEpisode(episode), actions, batch_size, recipe.seed)


def check_recorded_arrays(
    setting: str, observation: Observation, action_size: int, config: RobotConfig, actions: ActionTokens
) -> None:
    """Raises UserError if a data set lacks an array that the policy reads, or has arrays or actions of other sizes.

    setting: key and value of the data set. observation: one recorded observation. action_size: numbers of a recorded
    action.
    """
    reads = actions.reads
    if action_size != actions.simulator_size or any(name not in observation for name in reads.shapes):
        raise UserError(
            f"{setting} has actions of {action_size} numbers and the arrays {sorted(observation)}; the policy needs "
            f"{actions.simulator_size} numbers and the arrays {sorted(reads.shapes)}. Name a data set of the same "
            "robot."
        )
    given = read_spec(config.env).observation
    for name in reads.shapes:
        found, wanted = observation[name].shape, given[name].shape
        if found != wanted and (name == STATE or not reads.takes(name, found)):
            raise UserError(
                f"{setting} has the array {name!r} of shape {list(found)}, and the simulators of the recipe give "
                f"{list(wanted)}. Name a data set of the same robot."
            )
