"""Held-out accuracy of a model as it is, without training."""

import asyncio

from interlace.data.stream import PromptStream
from interlace.flows.run import StepResult
from interlace.jobs.assemble import assemble
from interlace.jobs.evaluation import Evaluation, Evaluator
from interlace.jobs.launch import ModelSources, launch_roles
from interlace.observe.progress import ProgressView
from interlace.recipes.clusters.base import run_on
from interlace.recipes.config import Recipe, algorithm_of
from interlace.recipes.prompts import recipe_prompts
from interlace.runtime.cluster import Cluster


def evaluate_model(recipe: Recipe, progress: ProgressView) -> Evaluation:
    """Evaluates the recipe's model on its held-out prompts, without its warm-up. The recipe was checked before."""

    async def evaluate(cluster: Cluster) -> Evaluation:
        return await _evaluate(cluster, recipe, progress)

    return asyncio.run(run_on(recipe.cluster, recipe.schedule.resolved, evaluate))


async def _evaluate(cluster: Cluster, recipe: Recipe, progress: ProgressView) -> Evaluation:
    prompts = recipe_prompts(recipe)
    longest = len(prompts.longest.token_ids)
    sources = ModelSources(recipe=recipe, policy=recipe.model, initial=recipe.model, longest_prompt=longest)
    groups = await launch_roles(cluster, sources)
    stream = PromptStream(prompts.train, recipe.seed)
    assembled = await assemble(cluster, recipe, algorithm_of(recipe), groups, stream, _NoSteps())
    await assembled.run.start()
    progress.stage("evaluation", 0, 1)
    evaluator = Evaluator(recipe, assembled.sampling, prompts.heldout, assembled.run, groups.reward)
    evaluation = await evaluator.evaluate()
    progress.stage("evaluation", 1, 1)
    if evaluation.warning:
        progress.say(f"evaluation: {evaluation.warning}")
    return evaluation


class _NoSteps:
    """Nothing is trained here, so there is no step to observe."""

    async def on_step(self, result: StepResult) -> bool:
        raise ValueError(f"step {result.step} of an evaluation, which has none")
