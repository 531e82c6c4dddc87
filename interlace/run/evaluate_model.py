"""Held-out accuracy of a model without training."""

import asyncio

from interlace.data.stream import PromptStream
from interlace.observe.progress import ProgressView
from interlace.run.clusters.base import run_on
from interlace.run.evaluation import Evaluation
from interlace.run.evaluator import Evaluator
from interlace.run.host import host
from interlace.run.launch import ModelSources, launch_roles
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import recipe_prompts
from interlace.runtime.cluster import Cluster


def evaluate_model(recipe: Recipe, progress: ProgressView) -> Evaluation:
    """Evaluates the recipe's model, without its warm-up, on held-out prompts. The recipe must have been checked."""

    async def evaluate(cluster: Cluster) -> Evaluation:
        return await _evaluate_on(cluster, recipe, progress)

    return asyncio.run(run_on(recipe.cluster, recipe.schedule.resolved, evaluate))


async def _evaluate_on(cluster: Cluster, recipe: Recipe, progress: ProgressView) -> Evaluation:
    prompts = recipe_prompts(recipe)
    longest = len(prompts.longest.token_ids)
    sources = ModelSources(recipe=recipe, policy=recipe.model, initial=recipe.model, longest_prompt=longest)
    groups = await launch_roles(cluster, sources)
    hosted = await host(cluster, recipe, groups, PromptStream(prompts.train, recipe.seed))
    await hosted.run.start()
    progress.stage("evaluation", 0, 1)
    evaluation = await Evaluator(hosted, prompts.first_of_each_set(recipe.evaluation.num_prompts)).evaluate()
    progress.stage("evaluation", 1, 1)
    if evaluation.warning:
        progress.say(f"evaluation: {evaluation.warning}")
    return evaluation
