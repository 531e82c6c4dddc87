"""The roles of a run, joined and ready to start."""

from dataclasses import dataclass

from interlace.algorithms import Algorithm
from interlace.core.types import PromptSource, SamplingParams
from interlace.flows.run import LoopSettings, PolicyRun, RoleGroups, StepObserver
from interlace.jobs.state import RunState
from interlace.recipes.config import Recipe
from interlace.rewards.shaping import ShapingConfig
from interlace.runtime.cluster import Cluster
from interlace.stages.factory import LoopSizes, StageFactory
from interlace.stages.role_groups import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Assembled:
    """Parts that a session works with."""

    run: PolicyRun
    sampling: SamplingParams
    """The recipe's, ending where the model's responses end."""


async def sampling_of(recipe: Recipe, engine: RolloutGroup) -> SamplingParams:
    """Returns the recipe's sampling, ending where the engine's model ends its responses too."""
    stops = dict.fromkeys((*recipe.sampling.stop_token_ids, *await engine.stop_token_ids()))
    return recipe.sampling.model_copy(update={"stop_token_ids": tuple(stops)})


async def assemble(
    cluster: Cluster,
    recipe: Recipe,
    algorithm: Algorithm,
    groups: RoleGroups,
    prompts: PromptSource,
    observer: StepObserver,
    *,
    resumed: RunState | None = None,
) -> Assembled:
    """Joins the workers of a recipe. resumed: where the run stands that goes on."""
    sampling = await sampling_of(recipe, groups.rollout[0])
    settings = LoopSettings(
        sampling=sampling,
        shaping=recipe.reward.shaping if recipe.reward else ShapingConfig(),
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
        ),
    )
    if resumed:
        stages.gate.restore(resumed.num_groups)
    run = PolicyRun(cluster, stages, groups, algorithm, settings, prompts, observer)
    return Assembled(run=run, sampling=sampling)
