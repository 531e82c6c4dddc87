"""Runs a recipe's own episodes on one engine, for samples of the policy and a model of their turns."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np

from interlace.core.types import Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.forecast.profile.fit import quantiles_of
from interlace.forecast.profile.samples import ENOUGH_SAMPLES
from interlace.forecast.profile.types import Turns
from interlace.robots.envs.fleet import EnvFleet
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.generate import FromPool, run_episode
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.session import EpisodeSession
from interlace.rollouts.turns import make_answered_sample
from interlace.run.host import episodes_of
from interlace.run.recipe.config import Recipe
from interlace.runtime.cluster import Cluster

MIN_REWARD, MAX_REWARD = 0.0, 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnEpisodes:
    """Completed episodes."""

    samples: Sequence[Sample]
    """Samples of the episodes that did not fail."""
    responses: Sequence[Sample]
    """Each turn as a separate sample."""
    turns: Turns


@dataclass(slots=True, eq=False)
class _Course:
    """Engine client of one episode's session, which records the episode's turns."""

    pool: FromPool
    prompt_tokens: int = 0
    has_envs: bool = False
    """True if each turn has a separate context: the prompt and an observation."""
    responses: list[Response] = field(default_factory=list)
    given: list[int] = field(default_factory=list)
    tool_s: list[float] = field(default_factory=list)
    ended_s: float = 0.0

    async def __call__(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Response:
        """Serves a request and records the start and end of the turn."""
        if self.has_envs:
            self.given.append(max(0, len(request.prompt_ids) - self.prompt_tokens))
        elif self.responses:
            before = self.responses[-1]
            known = len(before.request.prompt_ids) + len(before.token_ids)
            self.given.append(max(0, len(request.prompt_ids) - known))
            self.tool_s.append(max(0.0, time.perf_counter() - self.ended_s))
        response = await self.pool(request, who=who, what=what, on_draft=on_draft, patience_s=patience_s)
        self.responses.append(response)
        self.ended_s = time.perf_counter()
        return response


async def draw_episodes(
    cluster: Cluster,
    engine: RolloutGroup,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    recipe: Recipe,
    *,
    budget_s: float,
    envs: EnvFleet | None = None,
) -> DrawnEpisodes:
    """Runs the episodes of whole steps until there are enough samples or the time is over; at least one step.

    envs: simulators of the recipe's episodes, if any. Rewards are clipped to 0 ... 1.
    Raises the first failure if all episodes fail.
    """
    pool = EnginePool(
        cluster,
        [engine],
        recipe.schedule.resolved,
        samples_per_step=recipe.prompts_per_step * recipe.samples_per_prompt,
        expected_tokens=sampling.max_new_tokens,
        on_suspended=lambda: None,
    )
    pool.start()
    episode, limits = episodes_of(cluster, recipe, sampling)
    limits = replace(limits, simulators=envs)
    courses: list[_Course] = []
    samples: list[Sample] = []
    failures: list[Exception] = []

    async def run(key: SampleKey, prompt: Prompt) -> None:
        course = _Course(FromPool(cluster, pool), prompt_tokens=len(prompt.token_ids), has_envs=envs is not None)
        sample = Sample(key=key, prompt=prompt)
        session = EpisodeSession(cluster, course, sample, sampling, limits)
        try:
            columns = await run_episode(episode, session, prompt)
            samples.append(replace(sample, **cast(Any, columns)))
            courses.append(course)
        except Exception as error:  # noqa: BLE001 - as in a run, an exception ends only its own episode
            failures.append(error)
        finally:
            pool.finish(key)

    start_s, per_step = time.perf_counter(), recipe.prompts_per_step
    for first in range(0, max(1, len(prompts) - per_step + 1), per_step):
        wave = [
            (SampleKey(first + place, index), prompt)
            for place, prompt in enumerate(prompts[first : first + per_step])
            for index in range(recipe.samples_per_prompt)
        ]
        pool.admit([key for key, _ in wave], as_episodes=True)
        await asyncio.gather(*(run(key, prompt) for key, prompt in wave))
        if len(samples) >= ENOUGH_SAMPLES or time.perf_counter() - start_s > budget_s:
            break
    if not samples:
        raise failures[0]
    return _sort_episodes(samples, courses)


def _sort_episodes(samples: Sequence[Sample], courses: Sequence[_Course]) -> DrawnEpisodes:
    """Sorts episodes by the keys of their samples. courses: one per sample."""
    pairs = sorted(zip(samples, courses, strict=True), key=lambda pair: pair[0].key)
    return DrawnEpisodes(
        samples=[sample for sample, _ in pairs],
        responses=[
            make_answered_sample(sample.key, sample.prompt, response)
            for sample, course in pairs
            for response in course.responses
        ],
        turns=turn_model(courses, samples),
    )


def turn_model(courses: Sequence[_Course], samples: Sequence[Sample]) -> Turns:
    """Returns the quantiles of the recorded turns."""
    rewards = [sample.outcome.reward for sample in samples if sample.outcome is not None]
    return Turns(
        turns=quantiles_of([len(course.responses) for course in courses] or [0.0]),
        given_tokens=quantiles_of([count for course in courses for count in course.given] or [0.0]),
        tool_s=quantiles_of([seconds for course in courses for seconds in course.tool_s] or [0.0]),
        reward=float(np.clip(np.mean(rewards), MIN_REWARD, MAX_REWARD)) if rewards else 0.0,
    )
