"""Builds the run of a recipe on an open cluster, for training, evaluation, profiling and simulation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from interlace.algorithms import Algorithm
from interlace.core.prompts import PromptSource
from interlace.core.random import keyed_random
from interlace.core.recovery import RestartBudget
from interlace.core.types import Metrics, SamplingParams
from interlace.engines.rollout.config import ServiceConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.train.config import training_temperature
from interlace.flows.policy import policy_optimization
from interlace.flows.run import SINGLE_TURN, PolicyRun, RoleGroups
from interlace.flows.steps import LoopSettings, StepObserver
from interlace.models.action_tokens import ActionTokens, action_tokens
from interlace.models.loading import count_ids, empty_model, load_tokenizer
from interlace.models.size import context_length
from interlace.rewards.shaping import ShapingConfig, SourceShaping
from interlace.robots.env_stage import fleet_of, simulators_of
from interlace.robots.envs.fleet import EnvFleet
from interlace.rollouts.base import Closing, Episode, Filming
from interlace.rollouts.by_row import create_episode
from interlace.rollouts.episode_process import patience_s
from interlace.rollouts.episode_workers import WorkerEpisodes
from interlace.rollouts.membership import MembershipRules
from interlace.rollouts.role_groups import EnvGroup, RolloutGroup
from interlace.rollouts.session import NO_LIMITS, SessionLimits
from interlace.run.recipe.config import Recipe, algorithm_of, list_rewards
from interlace.run.recipe.prompts import renderer_of
from interlace.run.state import RunState
from interlace.runtime.cluster import Cluster
from interlace.schedule.lengths import LengthPredictor
from interlace.stages.factory import LiveSchedule, LoopSizes, StageFactory

PROBE_TOKENS = 24
"""Tokens of the text that checks a server's weights."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Hosted:
    """Parts of a built run that its callers use."""

    recipe: Recipe
    groups: RoleGroups
    run: PolicyRun
    sampling: SamplingParams
    """The recipe's sampling parameters, with the stop tokens of the engine's model."""
    live: LiveSchedule
    """Changes of the schedule between two steps."""
    filming: Filming | None = None
    """The run's episode if it can record films, else None."""

    async def train(self, observer: StepObserver) -> None:
        """Starts the run and trains to its last step. observer: called at each step boundary."""
        await self.run.start(observer)
        await policy_optimization(self.run)


async def sampling_of(recipe: Recipe, engine: RolloutGroup) -> SamplingParams:
    """Returns the recipe's sampling parameters, with the stop tokens of the engine's model added.

    Raises UserError if these are too many together.
    """
    stops = dict.fromkeys((*recipe.sampling.stop_token_ids, *await engine.stop_token_ids()))
    return SamplingParams.parse({**recipe.sampling.model_dump(), "stop_token_ids": tuple(stops)}, where="sampling")


def session_limits(
    recipe: Recipe, actions: ActionTokens | None, context: int | None, stop_token_ids: Sequence[int]
) -> SessionLimits:
    """Returns the limits of a recipe's episodes. actions: see policy_actions_of(). context: the model's, in tokens.

    stop_token_ids: tokens at which the engines end an answer.
    """
    if recipe.episode.is_single_turn:
        return NO_LIMITS
    return SessionLimits(
        renderer=renderer_of(recipe, stop_token_ids=stop_token_ids),
        actions=actions,
        timeout_s=recipe.episode.timeout_s,
        max_turns=recipe.episode.max_turns,
        max_tokens=create_kind(recipe.rollout).longest_sequence(context),
        column=recipe.episode.column,
        others=recipe.episode.others,
    )


def policy_actions_of(recipe: Recipe) -> ActionTokens | None:
    """Returns the action tokens of a recipe's policy; None if the policy is not a robot's."""
    return action_tokens(empty_model(recipe.model).config)


def episodes_of(cluster: Cluster, recipe: Recipe, sampling: SamplingParams) -> tuple[Episode, SessionLimits]:
    """Returns the recipe's episode, run here or in processes that end with the cluster, and its limits here."""
    if recipe.episode.is_single_turn:
        return SINGLE_TURN, NO_LIMITS
    actions, context = policy_actions_of(recipe), context_length(empty_model(recipe.model).config)
    make = partial(_in_process, recipe, actions, context, sampling.stop_token_ids)
    if not recipe.episode.workers:
        episode, limits = make()
        if isinstance(episode, Closing):
            cluster.at_end(episode.close)
        return episode, limits
    budget = RestartBudget("episode", recipe.recovery.restarts_per_hour.get("episode"))
    place = cluster.place_child
    workers = WorkerEpisodes(make, sampling, recipe.episode.workers, place=place, budget=budget)
    cluster.at_end(workers.close)
    # The processes render messages and apply timeouts; the limit here only catches a process that hangs.
    limits = session_limits(recipe, actions, context, sampling.stop_token_ids)
    others = {
        label: other.model_copy(update={"timeout_s": patience_s(other.timeout_s)})
        for label, other in limits.others.items()
    }
    return workers, replace(limits, renderer=None, timeout_s=patience_s(limits.timeout_s), others=others)


def _in_process(
    recipe: Recipe, actions: ActionTokens | None, context: int | None, stop_token_ids: Sequence[int]
) -> tuple[Episode, SessionLimits]:
    # Without the model, whose import would delay each start of a process by seconds.
    return create_episode(recipe.episode), session_limits(recipe, actions, context, stop_token_ids)


def envs_of(cluster: Cluster, recipe: Recipe, groups: Sequence[EnvGroup]) -> EnvFleet | None:
    """Returns the environments that a recipe's episodes lease; None if they use none."""
    config, schedule = simulators_of(recipe.episode), recipe.schedule.resolved
    if config is None:
        return None
    return fleet_of(cluster, groups, config, schedule, samples_per_prompt=recipe.samples_per_prompt)


async def host(
    cluster: Cluster,
    recipe: Recipe,
    groups: RoleGroups,
    prompts: PromptSource,
    *,
    algorithm: Algorithm | None = None,
    resumed: RunState | None = None,
    stand_in: Episode | None = None,
    predictor: LengthPredictor | None = None,
) -> Hosted:
    """Joins the workers of a recipe into a run. The run is not started yet.

    algorithm, stand_in: replace the recipe's algorithm and episode. resumed: state of a run to continue.
    predictor: predicts response lengths instead of the ranker that the run trains.
    """
    sampling = await sampling_of(recipe, groups.rollout[0])
    episode, limits = (stand_in, NO_LIMITS) if stand_in else episodes_of(cluster, recipe, sampling)
    envs = envs_of(cluster, recipe, groups.env)
    limits = replace(limits, simulators=envs)
    settings = LoopSettings(
        sampling=sampling,
        counts=envs.metrics if envs else Metrics,
        shaping=SourceShaping(
            default=recipe.reward.shaping if recipe.reward else ShapingConfig(),
            by_source={source: reward.shaping for source, reward in recipe.task.rewards.items()},
        ),
        adds_verdicts=any(reward.adds_verdicts for reward in list_rewards(recipe)),
        limits=limits,
        recovery=recipe.recovery,
        membership=make_membership_rules(recipe, is_simulated=stand_in is not None),
    )
    stages = StageFactory(
        cluster,
        recipe.schedule.resolved,
        LoopSizes(
            prompts_per_step=recipe.prompts_per_step,
            samples_per_prompt=recipe.samples_per_prompt,
            num_steps=recipe.steps,
            done_steps=resumed.done_steps if resumed else 0,
            minibatches=recipe.minibatches,
            epochs=recipe.epochs,
        ),
        predictor,
    )
    if resumed:
        stages.gate.restore(resumed.num_groups)
    run = PolicyRun(cluster, stages, groups, algorithm or algorithm_of(recipe), settings, prompts, episode)
    if recipe.weights.adapter == "alone":
        stages.live.limit_adapters()
    filming = episode if isinstance(episode, Filming) else None
    return Hosted(recipe=recipe, groups=groups, run=run, sampling=sampling, live=stages.live, filming=filming)


def make_membership_rules(recipe: Recipe, *, is_simulated: bool = False) -> MembershipRules:
    """Returns the rules for a recipe's engines. Servers may join, leave, and return after a loss.

    is_simulated: the engines only take time, so that none is a server.
    """
    config, restarts_per_hour = recipe.rollout, recipe.recovery.restarts_per_hour.get("rollout")
    if is_simulated or not create_kind(config).is_service or not isinstance(config, ServiceConfig):
        return MembershipRules(restarts_per_hour=restarts_per_hour)
    probe_ids: list[int] = []
    if training_temperature(recipe.sampling) == 1.0:  # servers score at temperature 1
        vocab_size = empty_model(recipe.model).config.get_text_config().vocab_size
        num_ids = min(vocab_size, count_ids(load_tokenizer(recipe.model)))  # the trainer scores no id beyond these
        draw = keyed_random("probe of engine services")
        probe_ids = [draw.randrange(num_ids) for _ in range(PROBE_TOKENS)]
    return MembershipRules(
        may_change=True,
        watch_every_s=config.heartbeat_s,
        lost_s=config.lost_s,
        probe_ids=probe_ids,
        restarts_per_hour=restarts_per_hour,
    )
