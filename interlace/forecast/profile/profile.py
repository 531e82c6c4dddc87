"""Measures a recipe's workers on this machine through the worker classes and calls of training, once per workload."""

import asyncio
import json
import platform
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median

import numpy as np

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.types import Prompt, Sample, SamplingParams
from interlace.core.version import VERSION
from interlace.core.yaml_text import read_mapping
from interlace.data.loading import PromptSet
from interlace.data.stream import PromptStream
from interlace.flows.run import RoleGroups
from interlace.forecast.profile.layouts import SPREAD, MeasuredLayout, fit_layouts
from interlace.forecast.profile.rollout import measure_rollout
from interlace.forecast.profile.samples import draw_episodes, draw_samples, measure_lengths, measure_reward, sizes_of
from interlace.forecast.profile.steps import StepTimes, fit_profile, measure_steps
from interlace.forecast.profile.training import (
    measure_export,
    measure_inference,
    measure_interference,
    measure_training,
)
from interlace.forecast.profile.types import (
    EnvCosts,
    InferenceCosts,
    Interference,
    Profile,
    RewardCosts,
    TrainCosts,
    Turns,
)
from interlace.forecast.recipe_check import AcceptsHere
from interlace.observe.atomic_file import write_atomic
from interlace.observe.progress import ProgressView
from interlace.robots.env_stage import simulators_of
from interlace.robots.envs.fleet import EnvFleet
from interlace.rollouts.envs.spec import EnvEpisode, Start
from interlace.rollouts.role_groups import ActorGroup, CriticGroup, ReferenceGroup, RolloutGroup
from interlace.run.clusters.base import back_end, run_on
from interlace.run.host import envs_of, sampling_of
from interlace.run.launch import ModelSources, launch_roles
from interlace.run.recipe.config import Recipe, ScheduleChoice, algorithm_of
from interlace.run.recipe.prompts import recipe_prompts
from interlace.run.warmup import make_warmed_model
from interlace.run.weights import join_weights
from interlace.runtime.cluster import Cluster
from interlace.schedule.placement import Device
from interlace.schedule.schedule import Schedule

PARTS = ("samples", "simulators", "rollout", "reward", "reference", "critic", "actor", "side by side", "whole steps")
"""Parts that are measured on the first cluster, in order."""
NO_STEP = 1e-12
"""Learning rate that leaves the weights unchanged."""
SHARES = {"samples": 0.1, "rollout": 0.2, "reward": 0.05, "whole steps": 0.15}
"""Share of the budget for each part; the others get a tenth. Parts that an algorithm does not need are skipped. "Whole
steps" run on four clusters if there are several devices."""


ROUNDS = 8
"""Timed chunks per number of environments, if the time allows."""


async def measure_envs(envs: EnvFleet, *, num_envs: int, processes: int, chunk: int, budget_s: float) -> EnvCosts:
    """Measures environments on the host, with random actions; rendering is included if the observations are pictures.

    num_envs: environments of the recipe. processes: parallel simulator processes. chunk: actions per chunk. budget_s:
    approximate seconds; each number of environments is timed at least once.
    """
    until_s, resets = time.perf_counter() + budget_s, list[float]()
    chunks: list[tuple[int, float]] = []
    for size in sorted({1, max(1, num_envs // 4), num_envs}):
        seconds = [await _measure_round(envs, size, chunk, resets)]
        while len(seconds) < ROUNDS and time.perf_counter() < until_s:
            seconds.append(await _measure_round(envs, size, chunk, resets))
        # A chunk in several environments takes at least as long as in one; a shorter time is noise.
        chunks.append((size, max(median(seconds), chunks[-1][1] if chunks else 0.0)))
    return EnvCosts(chunks=tuple(chunks), reset_s=median(resets), host_processes=processes)


async def _measure_round(envs: EnvFleet, size: int, chunk: int, resets: list[float]) -> float:
    """Resets `size` environments and steps them together. Returns the seconds of the chunk; appends to `resets`."""
    async with AsyncExitStack() as stack:
        began_s = time.perf_counter()
        starts = [Start(task=0, init_state=number) for number in range(size)]
        episodes = await asyncio.gather(*(stack.enter_async_context(envs.episode(start)) for start in starts))
        reset_s = time.perf_counter()
        resets.append((reset_s - began_s) / size)
        await asyncio.gather(
            *(episode.chunk_step(_actions(episode, chunk, seed)) for seed, episode in enumerate(episodes))
        )
        return time.perf_counter() - reset_s


def _actions(episode: EnvEpisode, chunk: int, seed: int) -> np.ndarray:
    """Draws the actions of a chunk, [K, A], within the limits of the environment."""
    spec = episode.spec.action
    drawn = np.random.default_rng(seed).uniform(spec.low, spec.high, size=(chunk, len(spec.low)))
    return drawn.astype(np.float32)


def profile_recipe(recipe: Recipe, progress: ProgressView, *, source: str = "", budget_s: float) -> Profile:
    """Measures a recipe, which must have been checked, on its cluster.

    source: origin that the profile states. budget_s: approximate seconds; rounds that have started are finished, and
    each part is measured at least once.
    """
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    prompts, spread = recipe_prompts(recipe), with_zero_lr(recipe, SPREAD.schedule(len(devices)))

    async def measure(cluster: Cluster) -> tuple[Profile, StepTimes | None]:
        groups = await _launch_workers(cluster, spread, prompts, progress)
        sampling = await sampling_of(spread, groups.rollout[0])
        measurement = _Measurement(cluster, spread, groups, sampling, progress, budget_s)
        return await measurement.measure(prompts.train, source)

    profile, steps = asyncio.run(run_on(recipe.cluster, spread.schedule.resolved, measure))
    if steps is None:
        return profile
    profile = fit_profile(profile, steps, spread, len(devices))
    if len({device.pool for device in devices}) > 1 or len(devices) == 1:
        return profile  # no device to share
    refusal_of = AcceptsHere(recipe, devices, len(prompts.longest.token_ids))

    def lay(layout: MeasuredLayout) -> Recipe:
        return with_zero_lr(recipe, layout.schedule(len(devices)))

    def measure_layout(so_far: Profile, layout: MeasuredLayout) -> StepTimes | None:
        laid_out = lay(layout)
        if refusal := refusal_of(laid_out.schedule.resolved):
            progress.say(f"left out, {layout.name}: {refusal}")
            return None
        progress.say(f"whole steps, {layout.name}")
        return _whole_steps(so_far, laid_out, prompts, progress, budget_s=SHARES["whole steps"] * budget_s)

    return fit_layouts(profile, steps, measure_layout, lay, len(devices))


async def _launch_workers(cluster: Cluster, recipe: Recipe, prompts: PromptSet, progress: ProgressView) -> RoleGroups:
    model = await make_warmed_model(cluster, recipe, prompts, progress)
    longest = len(prompts.longest.token_ids)
    sources = ModelSources(recipe=recipe, policy=model, initial=model, longest_prompt=longest)
    groups = await launch_roles(cluster, sources)
    await join_weights(groups, recipe)
    return groups


def _whole_steps(
    profile: Profile, recipe: Recipe, prompts: PromptSet, progress: ProgressView, *, budget_s: float
) -> StepTimes | None:
    """Runs steps of a recipe under its schedule on a separate cluster."""

    async def measure(cluster: Cluster) -> StepTimes | None:
        groups = await _launch_workers(cluster, recipe, prompts, progress)
        stream = PromptStream(prompts.train, recipe.seed)
        return await measure_steps(profile, cluster, recipe, groups, stream, budget_s=budget_s)

    return asyncio.run(run_on(recipe.cluster, recipe.schedule.resolved, measure))


def with_zero_lr(recipe: Recipe, schedule: Schedule) -> Recipe:
    """Returns the recipe under a schedule, with a learning rate at which training at full cost changes no weight."""
    still = {"lr": NO_STEP, "schedule": "constant"}
    return recipe.model_copy(
        update={
            "schedule": ScheduleChoice(preset="a profile's", resolved=schedule),
            "optimizer": recipe.optimizer.model_copy(update=still),
            "critic": recipe.critic.model_copy(update={"optimizer": recipe.critic.optimizer.model_copy(update=still)}),
        }
    )


class _Measurement:
    def __init__(
        self,
        cluster: Cluster,
        recipe: Recipe,
        groups: RoleGroups,
        sampling: SamplingParams,
        progress: ProgressView,
        budget_s: float,
    ) -> None:
        self._cluster, self._groups, self._sampling = cluster, groups, sampling
        self._recipe, self._progress, self._budget_s = recipe, progress, budget_s
        self._envs = envs_of(cluster, recipe, groups.env)

    async def measure(self, prompts: Sequence[Prompt], source: str) -> tuple[Profile, StepTimes | None]:
        recipe, cluster, groups = self._recipe, self._cluster, self._groups
        engine = groups.rollout[0]
        drawn, responses, turns = await self._draw_samples(engine, prompts, self._begin_part("samples"))
        rollout = await measure_rollout(engine, groups.actor, recipe, drawn, budget_s=self._begin_part("rollout"))
        reward = await self._reward(drawn)
        samples = [*drawn][: recipe.prompts_per_step * recipe.samples_per_prompt]
        profile = Profile(
            device=device_name(cluster.devices[0]),
            model=recipe.model.path,
            sizes=sizes_of(recipe),
            source=source,
            device_memory_bytes=cluster.devices[0].memory_bytes,
            rollout=rollout,
            reward=reward,
            lengths=measure_lengths(responses, wave=recipe.prompts_per_step * recipe.samples_per_prompt),
            turns=turns,
            env=await self._measure_simulators(),
            reference=await self._reference(samples),
            critic=await self._measure_critic(samples),
            actor=await self._measure_actor(samples),
            interference=await self._measure_interference(samples),
        )
        budget_s, stream = self._begin_part("whole steps"), PromptStream(prompts, recipe.seed)
        return profile, await measure_steps(profile, cluster, recipe, groups, stream, budget_s=budget_s)

    async def _draw_samples(
        self, engine: RolloutGroup, prompts: Sequence[Prompt], budget_s: float
    ) -> tuple[Sequence[Sample], Sequence[Sample], Turns | None]:
        """Draws samples. Returns them, each response as a sample, and the turns if samples have several."""
        recipe, sampling = self._recipe, self._sampling
        if recipe.episode.is_single_turn:
            drawn = await draw_samples(engine, prompts, sampling, recipe, budget_s=budget_s)
            return drawn, drawn, None
        found = await draw_episodes(
            self._cluster, engine, prompts, sampling, recipe, budget_s=budget_s, envs=self._envs
        )
        return found.samples, found.responses, found.turns

    async def _measure_simulators(self) -> EnvCosts | None:
        config = simulators_of(self._recipe.episode)
        if self._envs is None or config is None:
            return None
        robot = self._recipe.model.robot
        return await measure_envs(
            self._envs,
            num_envs=config.num_envs,
            processes=min(config.workers, config.num_envs),
            chunk=robot.chunk if robot else 1,
            budget_s=self._begin_part("simulators"),
        )

    async def _reward(self, drawn: Sequence[Sample]) -> RewardCosts:
        group, settings = self._groups.reward, self._recipe.reward
        if group is None or settings is None:
            return RewardCosts()
        return await measure_reward(group, drawn, settings, budget_s=self._begin_part("reward"))

    async def _reference(self, samples: Sequence[Sample]) -> InferenceCosts | None:
        if not self._groups.reference:
            return None
        budget_s, is_top = self._begin_part("reference"), algorithm_of(self._recipe).needs.teacher_top > 0
        operation = ReferenceGroup.top_logprobs if is_top else ReferenceGroup.logprobs
        return await measure_inference(self._groups.reference[0], operation, samples, budget_s=budget_s)

    async def _measure_critic(self, samples: Sequence[Sample]) -> TrainCosts | None:
        if not self._groups.critic:
            return None
        budget_s = self._begin_part("critic")
        needs = algorithm_of(self._recipe).needs
        operation = CriticGroup.process_rewards if needs.process_reward else CriticGroup.values
        return await measure_training(self._groups.critic, operation, samples, self._recipe, budget_s=budget_s)

    async def _measure_actor(self, samples: Sequence[Sample]) -> TrainCosts:
        budget_s = self._begin_part("actor")
        actor = self._groups.actor
        costs = await measure_training(actor, ActorGroup.logprobs, samples, self._recipe, budget_s=budget_s)
        return costs.model_copy(update={"export_s": await measure_export(actor)})

    async def _measure_interference(self, samples: Sequence[Sample]) -> tuple[Interference, ...]:
        budget_s = self._begin_part("side by side")
        return await measure_interference(self._groups, samples, self._sampling, self._recipe, budget_s=budget_s)

    def _begin_part(self, part: str) -> float:
        """Reports the next part as progress. Returns its share of the budget, in seconds."""
        self._progress.stage("profile", PARTS.index(part), len(PARTS), part)
        return SHARES.get(part, 0.1) * self._budget_s


def device_name(device: Device) -> str:
    """Returns the name of the kind of device: `cpu, one core of AMD EPYC 7B13`."""
    if device.pool == "cpu":
        return f"cpu, one core of {_read_processor()}"
    import torch

    return f"{device.pool}, {torch.cuda.get_device_name(device.pool_index)}"


def _read_processor() -> str:
    """Returns the model name of the processor on Linux, its architecture elsewhere."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


BUDGET_S = 45.0


def profile_file(recipe: Recipe) -> Path:
    """Returns the path of a recipe's profile on this machine; the file need not exist."""
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    task = {"model", "task", "episode", "reward", "algorithm", "warmup", "sampling"}
    measured = {*task, "renderer", "rollout", "actor", "critic", "reference", "weights"}
    sizes = {"prompts_per_step", "samples_per_prompt", "minibatches", "tokens_per_microbatch", "seed"}
    content = recipe.model_dump(mode="json", include=measured | sizes)
    machine = (device_name(devices[0]), len(devices), recipe.cluster.backend, recipe.cluster.threads_per_worker or 0)
    fields = json.dumps(Profile.model_json_schema(), sort_keys=True)  # a profile of other costs is measured again
    key = stable_hash(VERSION, fields, *machine, json.dumps(content, sort_keys=True))
    return Path(recipe.model.cache_dir).expanduser() / "profiles" / f"{key:016x}.json"


def profile_of(recipe: Recipe, progress: ProgressView) -> Profile:
    """Returns the recipe's profile on this machine. If none is stored, measures and stores one."""
    path = profile_file(recipe)
    if path.exists():
        return Profile.parse(read_mapping(path, remedy="Delete it to measure it again."), where=str(path))
    progress.say(f"measuring what the workers cost here, once; kept as {path}")
    measured = profile_recipe(recipe, progress, source="measured for a plan", budget_s=BUDGET_S)
    keep_profile(recipe, measured)
    return measured


def keep_profile(recipe: Recipe, profile: Profile) -> Path:
    """Stores a recipe's profile on this machine, replacing an older one. Returns its path."""
    path = profile_file(recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, profile.model_dump_json(indent=1) + "\n")
    return path


def check_profile(profile: Profile, recipe: Recipe) -> None:
    """Raises UserError if a profile is for another machine or model than the recipe's run on this machine."""
    here = device_name(back_end(recipe.cluster).find_devices(recipe.cluster)[0])
    if profile.basis != "measured" or profile.device != here:
        raise UserError(
            f"the profile is of {profile.label!r}, and this machine has {here!r}: what it predicts would not hold "
            "here. Leave --profile out to have this machine measured, or give --devices to plan for a virtual cluster."
        )
    if profile.model and profile.model != recipe.model.path:
        raise UserError(
            f"the profile is of model {profile.model!r}, and the recipe trains {recipe.model.path!r}. Leave --profile "
            "out to have the recipe measured, or measure it with `interlace profile RECIPE --out profile.json`."
        )
