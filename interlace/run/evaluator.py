"""Evaluates the policy: the rollout engines answer held-out prompts, greedily and by sampling."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from interlace.core.types import NO_GROUP, Prompt, Request, RewardResult, Sample, SampleKey, SamplingParams
from interlace.data.config import OWN_SET
from interlace.data.stream import PromptStream
from interlace.observe.progress import ProgressView, brief
from interlace.observe.run_data import EvaluationAnswer
from interlace.robots.episodes.robot import INIT_STATE, SUCCESS, TASK
from interlace.rollouts.base import FILMED
from interlace.rollouts.turns import make_answered_sample
from interlace.run.clusters.base import run_on
from interlace.run.evaluation import Estimate, Evaluation, estimate
from interlace.run.films import choose_films
from interlace.run.host import Hosted, host
from interlace.run.launch import ModelSources, launch_roles
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.prompts import recipe_prompts
from interlace.runtime.cluster import Cluster

RIGHT_FROM = 0.5
"""Threshold of success, or of reward if an episode reports no success, above which an episode counts as correct."""
Scored: TypeAlias = tuple[Sample, RewardResult]


class Evaluator:
    """Evaluates the same prompts with the same sampling noise each time, so that evaluations can be compared."""

    def __init__(self, hosted: Hosted, prompts: Sequence[Prompt]) -> None:
        """prompts: held-out prompts of all sets; sampled as in training, with the evaluation's temperature.

        Without prompts, or without a reward for single-turn episodes, no evaluation takes place.
        """
        recipe = hosted.recipe
        self._settings, self._sampling, self._scoring = recipe.evaluation, hosted.sampling, recipe.reward
        self._scoring_of = recipe.task.rewards
        self._plays, self._seed = not recipe.episode.is_single_turn, recipe.seed
        self._run, self._reward = hosted.run, hosted.groups.reward
        self._prompts = tuple(prompts) if self._reward or self._plays else ()

    @property
    def has_prompts(self) -> bool:
        """Returns whether there are prompts to evaluate on."""
        return bool(self._prompts)

    async def evaluate(self) -> Evaluation:
        """Answers and scores all held-out prompts with the current weights."""
        greedy = await self._answer_prompts(self._make_params(0.0), 1)
        await self._film_chosen(greedy)
        sampled = await self._answer_prompts(
            self._make_params(self._settings.temperature), self._settings.samples_per_prompt
        )
        failures = [result.failure for _, result in (*greedy, *sampled) if result.failure is not None]
        shown = sampled or greedy
        step = max(1, len(shown) // len(self._prompts))
        answers = [
            EvaluationAnswer(
                uid=sample.prompt.uid,
                prompt=sample.prompt.text,
                right_answer=sample.prompt.answer,
                response=sample.text,
                correct=self._is_right(result, sample.prompt.source),
            )
            for sample, result in shown[::step][: self._settings.num_shown]
        ]
        return Evaluation(
            num_prompts=len(self._prompts),
            greedy_accuracy=self._find_share(greedy),
            sampled_accuracy=self._find_share(sampled) if sampled else None,
            answers=tuple(answers),
            by_set=self._by_set(greedy, sampled),
            estimates=self._estimate_all(greedy, sampled),
            num_failed=len(failures),
            failure=brief(failures[0]) if failures else "",
        )

    def _by_set(self, greedy: Sequence[Scored], sampled: Sequence[Scored]) -> dict[str, tuple[float, float | None]]:
        """Returns the greedy and sampled accuracy of each held-out set; empty for a single set without a name."""
        found = {}
        for name in dict.fromkeys(prompt.source for prompt in self._prompts):
            first, others = ([one for one in kind if one[0].prompt.source == name] for kind in (greedy, sampled))
            found[name or OWN_SET] = (self._find_share(first), self._find_share(others) if others else None)
        return {} if set(found) <= {OWN_SET} else found

    def _estimate_all(self, greedy: Sequence[Scored], sampled: Sequence[Scored]) -> dict[str, Mapping[str, Estimate]]:
        """Returns the estimates of all prompts, and of each held-out set and robot's task if there are several."""
        settings, size = self._settings, self._settings.samples_per_prompt
        first, drawn = ([self._is_right(result, sample.prompt.source) for sample, result in kind]
                        for kind in (greedy, sampled))  # fmt: skip
        return {
            name: estimate(
                [first[place] for place in chosen],
                [drawn[place * size : (place + 1) * size] for place in chosen] if drawn else [],
                settings.pass_at,
                settings.resamples,
                self._seed,
            )
            for name, chosen in self._find_places().items()
        }

    def _find_places(self) -> dict[str, list[int]]:
        """Returns the indices of the prompts of each estimate, by its name; all prompts are unnamed."""
        found: dict[str, list[int]] = {"": list(range(len(self._prompts)))}
        sets = [prompt.source or OWN_SET for prompt in self._prompts]
        tasks = [prompt.text if {TASK, INIT_STATE} <= prompt.metadata.keys() else "" for prompt in self._prompts]
        for names in (sets, tasks):
            own: dict[str, list[int]] = {}
            for place, name in enumerate(names if len(set(names)) > 1 else ()):
                own.setdefault(name, []).append(place)
            own.pop("", None)  # prompts that are no robot's
            found = own | found  # a set replaces a task of the same name
        return found

    def _make_params(self, temperature: float) -> SamplingParams:
        return self._sampling.model_copy(update={"temperature": temperature})

    async def _answer_prompts(self, params: SamplingParams, count: int) -> Sequence[Scored]:
        kind = "greedy" if params.temperature == 0 else "sampled"
        asked = [(prompt, index) for prompt in self._prompts for index in range(count)]
        if self._plays:
            return await self._play_episodes(asked, params, kind)
        requests = [
            Request(
                uid=f"evaluation/{kind}/{prompt.uid}",
                owner=SampleKey(NO_GROUP, index),
                prompt_ids=prompt.token_ids.tolist(),
                params=params,
            )
            for prompt, index in asked
        ]
        responses = await self._run.outside.complete(requests)
        samples = [
            make_answered_sample(SampleKey(-1, index), prompt, response)
            for (prompt, index), response in zip(asked, responses, strict=True)
        ]
        results: list[RewardResult] = []
        if self._reward and samples:
            results = await self._reward.with_cause("evaluation").score(samples)
        return list(zip(samples, results, strict=True))

    async def _play_episodes(
        self, asked: Sequence[tuple[Prompt, int]], params: SamplingParams, kind: str
    ) -> Sequence[Scored]:
        """Runs episodes. The recipe's reward scores the episodes that give no reward themselves."""
        is_filmed = kind == "greedy" and self._settings.filmed == "first"
        filmed = {p.uid for p in self._prompts[: self._settings.num_shown]} if is_filmed else set()
        named = [(_name_episode(prompt, kind, prompt.uid in filmed), index) for prompt, index in asked]
        played = await self._run.outside.play(named, params)
        samples = [replace(sample, prompt=prompt) for sample, (prompt, _) in zip(played, asked, strict=True)]
        found = [sample.outcome for sample in samples]
        left = [place for place, given in enumerate(found) if given is None or given.is_partial]
        if self._reward and left:
            scored = await self._reward.with_cause("evaluation").score([samples[place] for place in left])
            for place, result in zip(left, scored, strict=True):
                found[place] = result
        none = RewardResult(failure="its episode brought no reward, and the recipe has none")
        return [(sample, result or none) for sample, result in zip(samples, found, strict=True)]

    async def _film_chosen(self, greedy: Sequence[Scored]) -> None:
        """Runs the greedy episodes that the outcomes choose once more, with the same noise, and films them."""
        settings = self._settings
        if not (self._plays and settings.num_shown and settings.filmed == "outcome"):
            return
        robots = [each for each in greedy if {TASK, INIT_STATE} <= each[0].prompt.metadata.keys()]
        right = [self._is_right(result, sample.prompt.source) for sample, result in robots]
        chosen = choose_films([result for _, result in robots], right, self._seed)
        named = [(_name_episode(robots[place][0].prompt, "greedy", label), 0) for place, label in chosen.items()]
        if named:
            await self._run.outside.play(named, self._make_params(0.0))

    def _find_share(self, scored: Sequence[Scored]) -> float:
        return sum(self._is_right(result, sample.prompt.source) for sample, result in scored) / len(scored)

    def _is_right(self, result: RewardResult, source: str) -> bool:
        if result.failure is None and SUCCESS in result.parts:
            return result.parts[SUCCESS] > RIGHT_FROM
        scoring = self._scoring_of.get(source, self._scoring)
        if scoring is None:
            return result.failure is None and result.reward > RIGHT_FROM
        return scoring.is_right(result)


def _name_episode(prompt: Prompt, kind: str, film: bool | str) -> Prompt:
    """Returns the prompt of an evaluation's episode. film: True or a label for a filmed episode."""
    metadata = {**prompt.metadata, FILMED: film} if film else prompt.metadata
    return replace(prompt, uid=f"evaluation/{kind}/{prompt.uid}", metadata=metadata)


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
