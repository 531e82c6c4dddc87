"""Robot episode: an observation becomes a prompt, and the simulator executes the answer, a chunk of action tokens.

Each turn contains the instruction and the current observation, without earlier turns.
"""

import math
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np
from pydantic import Field, model_validator

from interlace.core.config import Config
from interlace.core.errors import UserError
from interlace.core.types import BoolArray, FinishReason, FloatArray, Inputs, IntArray, Prompt
from interlace.data.starts import HELDOUT_FROM
from interlace.models.action_tokens import ActionTokens
from interlace.models.inputs import IMAGE, STATE
from interlace.observe.films import Film
from interlace.robots.envs.fleet import EnvFleet, read_spec
from interlace.robots.envs.load import EnvConfig, check_memory, find_family
from interlace.robots.features import Feature, StateFeatures
from interlace.robots.world_model.imagination import ImaginationConfig
from interlace.rollouts.base import DEFAULT_OPTIONS, FILMED, FinalContext, Outcome, Session, TurnOptions
from interlace.rollouts.config import EpisodeConfig, EpisodeKind
from interlace.rollouts.envs.spec import EnvEpisode, EnvSpec, FilmRecorder, Observation, SlotChunk, Start

TASK, INIT_STATE, SUCCESS, IMAGINED_SUCCESS = "task", "init_state", "env/success", "imagined/success"
"""Columns of a prompt that define the start of its episodes, and parts of a reward that count successes."""
RETURN, EPISODE_LENGTH = "env/return", "env/episode_length"
"""Further parts of a reward: the sum of the simulator's scaled rewards, and the number of actions."""


class ExpertHelp(Config):
    """A simulator's scripted expert that accompanies the policy in training episodes, for algorithm dagger."""

    takes_over_above: float | None = Field(default=None, gt=0)
    """Largest difference of a number between the policy's most probable chunk and the expert's, in the simulator's
    units, which the task tolerates in all numbers at once. Above it, the expert takes over, and only its chunks are
    labelled (HG-DAgger, arXiv 1810.02890); else the policy acts by this chunk. If None, the policy always acts, by a
    sampled chunk, and all chunks are labelled (DAgger, arXiv 1011.0686)."""
    returns_below: float | None = Field(default=None, ge=0)
    """Difference at or below which the policy acts again after the expert took over (LazyDAgger, arXiv 2104.00053). If
    None, half of takes_over_above."""

    @property
    def return_limit(self) -> float:
        """Returns the difference at or below which the policy acts again."""
        return (self.takes_over_above or 0.0) / 2 if self.returns_below is None else self.returns_below

    @model_validator(mode="after")
    def _check_returns(self) -> Self:
        limit, back = self.takes_over_above, self.returns_below
        if back is not None and (limit is None or back > limit):
            raise ValueError(
                f"returns_below = {back:g} with takes_over_above = {limit}: the policy acts again at a difference that "
                "is at most the one at which the expert takes over. Set takes_over_above, or lower returns_below"
            )
        return self


class RobotConfig(EpisodeConfig):
    """Settings of a robot's episodes."""

    name: str = "robot"
    env: EnvConfig
    """Simulators of the episodes."""
    features: tuple[Feature, ...] = ()
    """Numbers of the simulator's state vector that the policy sees, in order. If empty, the whole vector."""
    reward: Literal["success", "return"] = "success"
    """`success`: 1 if the task was solved, else 0. `return`: the simulator's rewards, each credited to its chunk. If
    these are positive at each step, set env.settings.end_on_success=false: a success would end them."""
    reward_scale: float = Field(default=1.0, gt=0)
    """Factor of the simulator's rewards."""
    bootstrap: bool = False
    """True if the horizon is not part of the task: the critic then values the last observation of a truncated episode.
    False if the task is to succeed within the horizon. With reward `success`, no reward follows a success, so that the
    end of an episode that continued after it (env.settings.end_on_success=false) is not valued."""
    expert: ExpertHelp | None = None
    """Expert whose answers to the policy's observations are kept; None for no expert. It does not act in held-out
    episodes."""
    imagined: ImaginationConfig | None = None
    """Episodes in the run's world model; None for no such episodes."""

    def configure_imagined(self, chunk: int) -> "RobotConfig":
        """Returns the settings of imagined episodes, whose states are the policy's inputs. chunk: K."""
        assert self.imagined is not None
        env = self.imagined.environments(chunk)
        own = {"env": env, "features": (), "reward_scale": 1.0, "bootstrap": True, "imagined": None}
        return self.model_copy(update=own)


class RobotKind(EpisodeKind):
    """Kind of episodes that run in simulators."""

    Config = RobotConfig
    config: RobotConfig

    def check(self) -> None:
        """Raises UserError for an unknown family or setting."""
        find_family(self.config.env.family, self.config.env.settings)

    def check_policy(self, actions: ActionTokens | None) -> None:
        """Raises UserError if the policy's actions, chunks or inputs do not fit the simulator."""
        check_memory(self.config.env)
        check_spaces(self.config, read_spec(self.config.env), policy_actions(actions))

    def create(self) -> "RobotEpisode":
        return RobotEpisode(self.config)


@dataclass(slots=True, kw_only=True)
class _Account:
    """Running totals of one episode."""

    context: list[int]
    """Tokens of each turn's prompt."""
    task: int
    expert: ExpertHelp | None
    """Expert of the episode; None for no expert."""
    valid: dict[int, BoolArray] = field(default_factory=dict)
    shown: dict[int, IntArray] = field(default_factory=dict)
    """Tokens of the expert's chunk, by turn."""
    num_taken_over: int = 0
    """Turns in which the expert acted."""
    has_expert_taken: bool = False
    """True if the expert acted in the last turn."""
    returned: float = 0.0
    length: int = 0
    """Number of executed actions."""


class RobotEpisode:
    """Runs episodes in the run's simulators."""

    def __init__(self, config: RobotConfig, own: EnvFleet | None = None) -> None:
        """own: imagined environments that replace the run's."""
        self.config, self._own, self._prefix = config, own, "imagined" if own else "env"
        self._features = StateFeatures(config.features)
        self._dreamer: RobotEpisode | None = None
        """Episode that runs in the world model; None before the first use."""
        self._is_checked = False
        self._films: list[Film] = []
        self._why_no_films = ""

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Lets the policy act until the episode ends. Raises UserError if policy and simulator do not fit together."""
        actions = policy_actions(session.actions)
        if self.config.imagined and self.config.imagined.is_imagined(prompt):
            return await self._make_dreaming(actions.chunk).run(prompt, session)
        start = Start(
            task=_read_integer(prompt, TASK), init_state=_read_integer(prompt, INIT_STATE), seed=session.seed % 2**31
        )
        context = actions.context(prompt.token_ids.tolist())
        expert = self.config.expert if start.init_state < HELDOUT_FROM else None
        async with session.simulator(start, self._own) as env:
            if not self._is_checked:
                check_spaces(self.config, env.spec, actions)
                self._is_checked = True
            if recorder := self._make_recorder(prompt, start, env.spec):
                await env.film(recorder)
            outcome = await self._play_episode(
                session, env, actions, _Account(context=context, task=start.task, expert=expert)
            )
        if recorder:
            self._why_no_films = recorder.problem
            self._films += [film for film in (recorder.film(outcome.text or ""),) if film]
        return outcome

    def close(self) -> None:
        """Ends the imagined environments."""
        if self._own:
            self._own.close()
        if self._dreamer:
            self._dreamer.close()

    def _make_dreaming(self, chunk: int) -> "RobotEpisode":
        if self._dreamer is None:
            config = self.config.configure_imagined(chunk)
            self._dreamer = RobotEpisode(config, EnvFleet(config.env))
        return self._dreamer

    def films(self) -> list[Film]:
        """Returns the films recorded since the last call, sorted by name."""
        found, self._films = sorted(self._films, key=lambda film: film.name), []
        return found

    def why_no_films(self) -> str:
        """Returns the reason why drawing failed; empty if it works."""
        return self._why_no_films

    def _make_recorder(self, prompt: Prompt, start: Start, spec: EnvSpec) -> FilmRecorder | None:
        """Returns the recorder of an episode's pictures, if its prompt requests them and drawing works."""
        if not prompt.metadata.get(FILMED) or self._why_no_films:
            return None
        label = prompt.metadata[FILMED]
        name = f"{spec.tasks[start.task]}, start {start.init_state}"
        return FilmRecorder(name, label=label if isinstance(label, str) else "")

    async def _play_episode(
        self, session: Session, env: EnvEpisode, actions: ActionTokens, account: "_Account"
    ) -> Outcome:
        params = session.params.model_copy(update={"max_new_tokens": actions.num_tokens, "stop_token_ids": ()})
        options = DEFAULT_OPTIONS
        if account.expert and account.expert.takes_over_above is not None:
            # The noise of a sampled chunk differs from the expert's chunk by more than the policy's error.
            params, options = params.model_copy(update={"temperature": 0.0}), TurnOptions(is_trained=False)
        while True:
            inputs = self.inputs(env.observation, actions)
            turn = await session.generate(
                account.context, params=params, inputs=inputs, query_ids=actions.query_ids, options=options
            )
            acted = actions.decode_answer(turn.token_ids)
            taken = await _ask_expert(env, actions, account, turn.number, acted) if account.expert else None
            # The run's simulators register waits for them.
            async with session.waiting("the world model") if self._own else nullcontext():
                chunk = await env.chunk_step(acted if taken is None else taken)
            gained = float(chunk.reward.sum()) * self.config.reward_scale
            account.returned += gained
            account.length += int(chunk.valid.sum())
            if self.config.reward == "return":
                session.reward(turn, gained)
            trained = actions.trained(chunk.valid)
            account.valid[turn.number] = trained if taken is None else np.zeros_like(trained)
            if chunk.ended:
                return self._make_outcome(
                    env.spec, chunk, account, self._make_final_context(chunk, actions, account.context)
                )

    def _make_outcome(
        self, spec: EnvSpec, chunk: SlotChunk, account: "_Account", final: FinalContext | None
    ) -> Outcome:
        success = float(chunk.success)
        told = {"success": success, "return": account.returned, "episode_length": float(account.length)}
        if account.expert:
            told["taken_over"] = account.num_taken_over / len(account.valid)
        parts = {f"{self._prefix}/{name}": value for name, value in told.items()}
        if len(spec.tasks) > 1:
            parts[f"{SUCCESS}/{spec.tasks[account.task]}"] = success
        return Outcome(
            reward=success if self.config.reward == "success" else 0.0,
            parts=parts,
            text=f"{'success' if success else 'no success'} after {account.length} actions",
            finish_reason=FinishReason.STOP if chunk.terminated else FinishReason.LENGTH,
            valid=account.valid,
            shown=account.shown,
            final=final,
        )

    def _make_final_context(self, chunk: SlotChunk, actions: ActionTokens, context: list[int]) -> FinalContext | None:
        is_rewarded = self.config.reward == "success" and chunk.success  # nothing can follow the only reward
        if not (self.config.bootstrap and chunk.truncated and not chunk.terminated) or is_rewarded:
            return None
        inputs = self.inputs(chunk.observation, actions)
        return FinalContext(token_ids=context, inputs=inputs, query_ids=actions.query_ids[:1])

    def inputs(self, observation: Observation, actions: ActionTokens) -> Inputs:
        """Returns the policy's input arrays for an observation, [1, ...] each."""
        if self._own:  # a world model predicts the policy's inputs, which are not scaled or cropped a second time
            return {name: np.asarray(observation[name])[None] for name in actions.reads.shapes}
        found = dict(observation)
        if "state" in found:
            found["state"] = self._features.of(np.asarray(found["state"], np.float32))
        return actions.reads.prepare(found)


async def _ask_expert(
    env: EnvEpisode, actions: ActionTokens, account: _Account, turn: int, acted: FloatArray
) -> FloatArray | None:
    """Records the expert's chunk for an observation. Returns it if the expert acts instead of the policy, else None.

    acted: [K, A] the policy's chunk.
    """
    assert account.expert
    chunk = np.asarray(await env.expert_actions(actions.chunk), np.float32)
    limit = account.expert.takes_over_above
    bounds = env.spec.action
    both = np.clip([acted, chunk], bounds.low, bounds.high)  # a number beyond the bounds acts as the bound does
    # Until the difference is small again: else the labels end at the limit, before the expert has reached its goal.
    exceeded = account.expert.return_limit if account.has_expert_taken else limit
    is_taken = exceeded is not None and float(np.abs(both[0] - both[1]).max()) > exceeded
    if limit is None or is_taken:
        account.shown[turn] = actions.encode(chunk)
    account.has_expert_taken = is_taken
    account.num_taken_over += is_taken
    return chunk if is_taken else None


def policy_actions(actions: ActionTokens | None) -> ActionTokens:
    """Returns a policy's action tokens. Raises UserError if the model has none."""
    if actions is None:
        raise UserError(
            "a robot's episode needs a policy that answers in action tokens, and the model's configuration has none. "
            "Take tiny:vla, or a folder in OpenVLA's layout."
        )
    return actions


def check_spaces(config: RobotConfig, spec: EnvSpec, actions: ActionTokens) -> None:
    """Raises UserError if the policy's actions or inputs do not fit the simulator."""
    spec.check_chunk(actions.chunk)
    num_chunks = math.ceil(spec.horizon / actions.chunk)
    if config.max_turns < num_chunks:
        raise UserError(
            f"episode.max_turns={config.max_turns} ends an episode by an error before its horizon of {spec.horizon} "
            f"actions in chunks of {actions.chunk}. Set it to {num_chunks} or more, or episode.env.settings.horizon "
            f"to {config.max_turns * actions.chunk} or less."
        )
    family = config.env.family
    if spec.action.size != actions.simulator_size:
        raise UserError(
            f"environments of {family!r} take actions of {spec.action.size} numbers, and the policy gives "
            f"{actions.simulator_size}. Set model.robot.action_size={spec.action.size}, or take another policy."
        )
    choices = spec.action.num_choices
    if choices is not None and actions.answers_in_numbers:
        raise UserError(
            f"an action of {family!r} is one of {choices} choices, and the policy's head gives continuous numbers. Set "
            f"model.robot.head=tokens and model.robot.bins={choices}, low=[-0.5] and high=[{choices - 0.5}]."
        )
    if choices is not None and _list_choices(actions) != list(range(choices)):
        raise UserError(
            f"an action of {family!r} is one of {choices}, and the policy's {actions.num_bins} bins from "
            f"{actions.low[0]:g} to {actions.high[0]:g} are not these. Set model.robot.bins={choices}, low=[-0.5] and "
            f"high=[{choices - 0.5}]."
        )
    for name, shape in actions.reads.shapes.items():
        given = spec.observation.get(name)
        if given is None:
            raise UserError(_missing_array(name, family, sorted(spec.observation)))
        is_made = name == "state" and config.features
        places = [place for feature in config.features if is_made for place in (*feature.of, *feature.minus)]
        if beyond := [place for place in places if place >= given.shape[0] or place < -given.shape[0]]:
            raise UserError(
                f"episode.features takes place {beyond[0]} of a state of {given.shape[0]} numbers, which environments "
                f"of {family!r} give. Name places from 0 to {given.shape[0] - 1}."
            )
        size = (sum([len(feature.of) for feature in config.features]),) if is_made else given.shape
        if not actions.reads.takes(name, size):
            raise UserError(
                f"the policy reads {name} of shape {list(shape)}, and the episode gives {list(size)}. Set "
                f"{_setting_of(name)}, so that both are alike."
            )


def _list_choices(actions: ActionTokens) -> list[int]:
    """Returns the choices of all bins of a policy with one number per action, as a simulator reads them."""
    ids = actions.first_id + actions.step * np.arange(actions.num_bins)
    return [int(number) for number in actions.decode(ids.astype(np.int32)).reshape(-1)]


def _missing_array(name: str, family: str, there: list[str]) -> str:
    """Returns the message for an array that the policy reads and the simulator does not provide."""
    cameras = [other for other in there if other.endswith(IMAGE)]
    if not name.endswith(IMAGE):
        return f"the policy reads {name!r}, and environments of {family!r} give {there}."
    if cameras:
        return (
            f"the policy reads the camera {name!r}, and environments of {family!r} render {cameras}. Take a policy of "
            "these cameras (num_images in its config.json), or another family."
        )
    return (
        f"the policy reads the camera {name!r}, and environments of {family!r} render none with these settings; they "
        f"give {there}. Set episode.env.settings.image_size to the side of a picture in pixels, if the family has it."
    )


def _setting_of(name: str) -> str:
    if name == STATE:
        return "model.robot.state_size, or episode.features"
    return "model.robot.image_size, or episode.env.settings.image_size"


def _read_integer(prompt: Prompt, column: str) -> int:
    value = prompt.metadata.get(column)
    if not isinstance(value, int):
        raise UserError(
            f"prompt {prompt.uid} has no whole number in its column {column!r}, which defines where a robot's episode "
            "begins. Take task.starts, or add the column."
        )
    return value
