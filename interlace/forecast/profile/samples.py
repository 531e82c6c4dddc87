"""Draws samples of a recipe's policy and measures their rewards: lengths, latencies, share of right answers, turns."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import numpy as np

from interlace.core.types import Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.forecast.profile.fit import (
    Call,
    fit,
    intraclass_correlation,
    log_spread,
    medians,
    quantiles_of,
    time_call,
)
from interlace.forecast.profile.rollout import serve_all
from interlace.forecast.profile.types import Lengths, RewardCosts, RunSizes, Turns
from interlace.rewards.config import RewardConfig
from interlace.robots.env_stage import simulators_of
from interlace.robots.envs.fleet import EnvFleet
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.generate import FromPool, run_episode
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.role_groups import RewardGroup, RolloutGroup
from interlace.rollouts.session import EpisodeSession
from interlace.rollouts.turns import make_answered_sample
from interlace.run.host import episodes_of
from interlace.run.recipe.config import Recipe
from interlace.runtime.cluster import Cluster
from interlace.schedule.lengths import LengthRanker, rank_correlation

Value = TypeVar("Value")
ENOUGH_SAMPLES = 512
"""Largest number of samples to draw."""
TIMED_ONE_BY_ONE = 48
"""Samples that are scored in separate calls."""


def sizes_of(recipe: Recipe) -> RunSizes:
    """Returns the sizes of a recipe's run."""
    simulators = simulators_of(recipe.episode)
    return RunSizes(
        prompts_per_step=recipe.prompts_per_step,
        samples_per_prompt=recipe.samples_per_prompt,
        max_new_tokens=recipe.sampling.max_new_tokens,
        num_envs=simulators.num_envs if simulators else 0,
    )


async def draw_samples(
    engine: RolloutGroup, prompts: Sequence[Prompt], sampling: SamplingParams, recipe: Recipe, *, budget_s: float
) -> list[Sample]:
    """Draws the samples of whole steps, each with new prompts, until there are enough or the time is over; at least one
    step.
    """
    found: list[Sample] = []
    start_s, per_step = time.perf_counter(), recipe.prompts_per_step
    for first in range(0, max(1, len(prompts) - per_step + 1), per_step):
        found += await _draw_step(engine, prompts[first : first + per_step], first, sampling, recipe)
        if len(found) >= ENOUGH_SAMPLES or time.perf_counter() - start_s > budget_s:
            break
    return found


async def _draw_step(
    engine: RolloutGroup, prompts: Sequence[Prompt], first: int, sampling: SamplingParams, recipe: Recipe
) -> list[Sample]:
    keys = [
        SampleKey(first + place, index) for place in range(len(prompts)) for index in range(recipe.samples_per_prompt)
    ]
    by_id = {}
    for key in keys:
        prompt = prompts[key.gid - first]
        request = Request(
            uid=prompt.uid,
            owner=key,
            prompt_ids=prompt.token_ids.tolist(),
            params=sampling,
        )
        by_id[request.id] = (key, prompt, request)
    responses, _ = await serve_all(engine, [request for _, _, request in by_id.values()])
    samples = []
    for response in responses:
        key, prompt, _ = by_id[response.request.id]
        samples.append(make_answered_sample(key, prompt, response))
    return sorted(samples, key=lambda sample: sample.key)


def measure_lengths(samples: Sequence[Sample], *, wave: int) -> Lengths:
    """Returns the quantiles of response lengths, and the rank correlation of length predictions.

    wave: samples that a step dispatches together.
    """
    groups = by_prompt(samples, [float(sample.num_tokens) for sample in samples])
    prompt_tokens = max(1, round(float(np.mean([len(sample.prompt.token_ids) for sample in samples]))))
    return lengths_of(groups, prompt_tokens=prompt_tokens, rank_correlation=measure_ranker(samples, wave=wave))


def measure_ranker(samples: Sequence[Sample], *, wave: int) -> float:
    """Returns the rank correlation between true lengths and the predictions of the ranker that runs use.

    The ranker predicts each wave from the previous waves, as in a run. Returns 0 for fewer than two waves.
    wave: number of samples.
    """
    ranker, pairs = LengthRanker(1.0, learns=True), list[tuple[float, float]]()
    for start in range(0, len(samples), wave):
        requests = [
            Request(
                uid=each.prompt.uid,
                owner=each.key,
                prompt_ids=each.prompt.token_ids.tolist(),
                params=SamplingParams(),
            )
            for each in samples[start : start + wave]
        ]
        predicted = [ranker.expect(request) for request in requests]
        lengths = [each.num_tokens for each in samples[start : start + wave]]
        if start:  # the ranker has no data for the first wave
            pairs += zip(predicted, map(float, lengths), strict=True)
        for request, length in zip(requests, lengths, strict=True):
            ranker.observe(request, length)
    if not pairs:
        return 0.0
    return max(0.0, rank_correlation([one for one, _ in pairs], [real for _, real in pairs]))


def lengths_of(groups: Sequence[Sequence[float]], *, prompt_tokens: int, rank_correlation: float = 0.0) -> Lengths:
    """Returns the distribution of response lengths. groups: lengths per prompt. prompt_tokens: mean prompt length."""
    lengths = [length for group in groups for length in group]
    spread = log_spread([[max(1.0, length) for length in group] for group in groups])
    return Lengths(
        prompt_tokens=prompt_tokens,
        median=max(1.0, float(np.median(lengths))),
        prompt_sigma=spread.between,
        response_sigma=spread.within,
        quantiles=quantiles_of(lengths),
        rank_correlation=rank_correlation,
    )


async def measure_reward(
    group: RewardGroup, samples: Sequence[Sample], reward: RewardConfig, *, budget_s: float
) -> RewardCosts:
    """Measures the latency and call overhead of scoring, the share of right answers, and its spread over prompts."""
    results = await group.score(samples)
    alone = [await time_call(_score(group, samples[place : place + 1])) for place in _spread_out(len(samples))]
    some, count = samples[: max(1, len(samples) // 4)], len(samples)
    calls = [_score(group, some), _score(group, samples), lambda: _score_each(group, samples)]
    times = await medians(calls, rounds=5, budget_s=budget_s)
    call_s, answer_s = fit([[1.0, float(len(some))], [1.0, float(count)], [float(count), float(count)]], times)
    workers = max(1, reward.workers)
    right = [reward.is_right(result) for result in results]
    failed = [result.failure is not None for result in results]
    logs = np.log(np.maximum(alone, 1e-9))
    return RewardCosts(
        median_s=float(answer_s) * min(workers, len(samples)),
        # Spread of single calls. If scoring is faster than the call overhead, its spread cannot be measured.
        sigma=float(np.std(logs)) if answer_s > call_s else 0.0,
        call_s=float(call_s),
        max_s=reward.timeout_s,
        workers=workers,
        solve_rate=sum(right) / len(right),
        solve_spread=intraclass_correlation(by_prompt(samples, right)),
        fail_share=sum(failed) / len(failed),
    )


def by_prompt(samples: Sequence[Sample], values: Sequence[Value]) -> list[list[Value]]:
    """Groups one value per sample into one list per prompt."""
    found: dict[int, list[Value]] = {}
    for sample, value in zip(samples, values, strict=True):
        found.setdefault(sample.key.gid, []).append(value)
    return list(found.values())


async def _score_each(group: RewardGroup, samples: Sequence[Sample]) -> None:
    """Scores each sample in a separate concurrent call, as a run does. This measures throughput, not latency."""
    await asyncio.gather(*(group.score([sample]) for sample in samples))


def _score(group: RewardGroup, samples: Sequence[Sample]) -> Call:
    return lambda: group.score(samples)


def _spread_out(count: int) -> range:
    return range(0, count, max(1, count // TIMED_ONE_BY_ONE))


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
