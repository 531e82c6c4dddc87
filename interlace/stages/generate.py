"""The generation stage: admitted prompts become requests, engines serve them, samples leave as they finish."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from interlace.core.runs import Runs
from interlace.core.training import WeightBundle
from interlace.core.types import (
    Completion,
    FinishReason,
    Metrics,
    Prompt,
    Request,
    Response,
    Sample,
    SampleKey,
    SamplingParams,
    Segment,
)
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.waits import Signal
from interlace.schedule.dispatch import create_dispatch
from interlace.schedule.lengths import LengthHistory
from interlace.schedule.schedule import Placement, Schedule
from interlace.schedule.tail import Migrate
from interlace.stages.driver import EngineDriver, Job
from interlace.stages.stream import GENERATED, SampleChannel, Stream

EVALUATION_ORDER = -math.inf
"""Evaluation goes before samples that have not started: the step boundary waits for it."""


def response_segment(done: Completion) -> Segment:
    """What a completion adds to its sample: one turn, of which the policy drew all."""
    return Segment(
        token_ids=np.asarray(done.token_ids, np.int32),
        logprobs=np.asarray(done.logprobs, np.float32),
        versions=Runs.of(done.versions),
    )


def answered(key: SampleKey, prompt: Prompt, response: Response) -> Sample:
    """A response from outside the flow as a sample, to be scored."""
    done = response.completion
    return Sample(
        key=key,
        prompt=prompt,
        segments=(response_segment(done),),
        finish_reason=done.finish_reason,
        text=response.text,
    )


def _shared_devices(cluster: Cluster, engines: Sequence[WorkerGroup[Any]]) -> frozenset[int]:
    """All devices of the engines, if another role may run on one of them; else none."""
    roles = [role for role in Placement.model_fields if role != "rollout"]
    others = {device.index for role in roles for devices in cluster.place(role) for device in devices}
    mine = frozenset(index for engine in engines for index in engine.device_indices)
    return frozenset() if mine.isdisjoint(others) else mine


class Generator:
    """All rollout instances behind one dispatch policy."""

    def __init__(
        self,
        cluster: Cluster,
        engines: Sequence[WorkerGroup[Any]],
        schedule: Schedule,
        params: SamplingParams,
        *,
        samples_per_step: int,
    ) -> None:
        """samples_per_step: what a share of a step's samples is reckoned from."""
        self._cluster, self._params = cluster, params
        self._policy = create_dispatch(schedule.dispatch)
        self._budget = schedule.rollout_budget
        self._migrate = schedule.tail if isinstance(schedule.tail, Migrate) else None
        self._samples_per_step = samples_per_step
        self._shared_devices = _shared_devices(cluster, engines) if self._migrate else frozenset()
        self._swapped = Signal(cluster.waits)
        self._lengths = LengthHistory(float(params.max_new_tokens))
        self._drivers = [
            EngineDriver(
                engine,
                cluster.waits,
                cluster.clock,
                cluster.timeline,
                schedule,
                on_swapped=self._swapped.fire,
                on_requeue=self._dispatch,
            )
            for engine in engines
        ]
        self._kept = self._drivers
        """Engines that get requests; fewer while the survivors of a step are gathered."""
        self._unfinished: dict[SampleKey, str] = {}
        """Each with the id of its request."""
        self._driver_of: dict[str, EngineDriver] = {}
        """Of each request that is out: there may be a thousand to look through."""
        self._suspended: dict[SampleKey, Job] = {}
        self._channel: SampleChannel | None = None
        self.on_generated: Callable[[SampleKey], None] = lambda _key: None
        """Told of each generated sample."""
        self.on_suspended: Callable[[], None] = lambda: None
        """Told that a sequence's budget is used up: the trainer may be waiting for it."""

    def start(self) -> None:
        """Starts the engines' loops."""
        for driver in self._drivers:
            self._cluster.spawn(driver.run(), name=driver.group.name)

    def attach(self, channel: SampleChannel) -> Stream:
        """Responses go to this channel. Returns the stream behind generation."""
        self._channel = channel
        return Stream(channel=channel).plus(*GENERATED)

    def generate(self, samples: Sequence[Sample]) -> None:
        """Dispatches a wave of admitted samples."""
        self._kept = self._drivers
        jobs = self._jobs(samples)
        self._unfinished.update((sample.key, job.request.id) for sample, job in zip(samples, jobs, strict=True))
        self._dispatch(jobs)

    async def complete(self, requests: Sequence[Request]) -> list[Response]:
        """Serves requests outside the flow (evaluation); they pass no gate. Responses in the order given."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Response]] = [loop.create_future() for _ in requests]
        jobs = [
            Job(
                request=request,
                order=EVALUATION_ORDER,
                expected_tokens=self._expected(request),
                deliver=partial(self._answered, future),
            )
            for request, future in zip(requests, futures, strict=True)
        ]
        self._deal(jobs, self._drivers)  # whatever tail is gathered meanwhile
        return [await self._cluster.waits.wait_for(future, who="evaluation", what="a response") for future in futures]

    def _answered(self, future: "asyncio.Future[Response]", response: Response) -> None:
        del self._driver_of[response.completion.request.id]
        future.set_result(response)

    def update_weights(self, bundle: WeightBundle) -> None:
        """Gives every engine new weights; each swaps when it may."""
        for driver in self._drivers:
            driver.update_weights(bundle)

    async def swapped(self, version: int) -> None:
        """Waits until every engine serves `version` or a newer one."""
        while any(driver.version < version for driver in self._drivers):
            await self._swapped.wait(who="publication", what=f"all engines to serve version {version}")

    def resume(self, gids: Sequence[int] | None = None) -> bool:
        """Suspended sequences of these groups (None: all) go on for another budget. False where there is none."""
        chosen = [key for key in self._suspended if gids is None or key.gid in gids]
        self._dispatch([self._suspended.pop(key) for key in chosen])
        return bool(chosen)

    @property
    def num_suspended(self) -> int:
        """Sequences whose budget is used up."""
        return len(self._suspended)

    def engine_metrics(self) -> Metrics:
        """What the engines counted up to their last swap of weights, added up over engines."""
        names = dict.fromkeys(name for driver in self._drivers for name in driver.metrics)
        return {name: sum(driver.metrics.get(name, 0.0) for driver in self._drivers) for name in names}

    def cancel(self, sample: Sample) -> None:
        """Stops generating a sample that ended for another reason."""
        request_id = self._unfinished.pop(sample.key)
        suspended = self._suspended.pop(sample.key, None)
        if suspended:
            self._cluster.timeline.drop_tokens(len(suspended.request.generated_ids))
        elif request_id in self._driver_of:
            self._driver_of.pop(request_id).cancel(request_id)

    def _dispatch(self, jobs: Sequence[Job]) -> None:
        self._deal(jobs, self._kept)

    def _deal(self, jobs: Sequence[Job], drivers: list[EngineDriver]) -> None:
        if not jobs:
            return
        ready = [driver for driver in drivers if driver.starts_new] or drivers
        chosen = self._policy.assign([job.expected_tokens for job in jobs], [driver.load for driver in ready])
        for job, engine in zip(jobs, chosen, strict=True):
            self._driver_of[job.request.id] = ready[engine]
            ready[engine].submit(job)

    def _jobs(self, samples: Sequence[Sample]) -> list[Job]:
        """One a sample; those of a prompt share its list of ids."""
        jobs: list[Job] = []
        prompt, ids = None, []
        for sample in samples:
            if sample.prompt is not prompt:
                prompt, ids = sample.prompt, sample.prompt.token_ids.tolist()
            request = Request(
                uid=prompt.uid,
                owner=SampleKey(sample.key.gid, sample.key.index),
                attempt=prompt.attempt,
                prompt_ids=ids,
                params=self._params,
            )
            jobs.append(self._job(sample, request))
        return jobs

    def _job(self, sample: Sample, request: Request) -> Job:
        expected = self._expected(request)
        return Job(
            request=self._within_budget(request),
            order=-expected if self._policy.longest_first else sample.key.gid,
            expected_tokens=expected,
            deliver=lambda response: self._ended(sample, response),
        )

    def _within_budget(self, request: Request) -> Request:
        if self._budget is None:
            return request
        limit = min(self._params.max_new_tokens, len(request.generated_ids) + self._budget)
        return replace(request, params=self._params.model_copy(update={"max_new_tokens": limit}))

    def _expected(self, request: Request) -> float:
        return len(request.prompt_ids) + self._lengths.expect(request.uid, len(request.prompt_ids))

    def _ended(self, sample: Sample, response: Response) -> None:
        done = response.completion
        del self._driver_of[done.request.id]
        if done.finish_reason == FinishReason.LENGTH and len(done.token_ids) < self._params.max_new_tokens:
            self._suspend(sample, response)
            return
        self._unfinished.pop(sample.key, None)
        self._lengths.observe(sample.prompt.uid, len(sample.prompt.token_ids), len(done.token_ids))
        if self._write(sample.key, response):
            self.on_generated(sample.key)
        if self._migrate:
            self._gather_survivors(self._migrate)

    def _suspend(self, sample: Sample, response: Response) -> None:
        """The budget is used up: the rest follows after the next publication."""
        self._suspended[sample.key] = self._job(sample, response.completion.resumed)
        self.on_suspended()

    def _write(self, key: SampleKey, response: Response) -> bool:
        if self._channel is None:
            raise ValueError("a sample finished before attach() named a channel")
        done = response.completion
        columns: dict[str, object] = {
            "segments": (response_segment(done),),
            "finish_reason": done.finish_reason,
            "text": response.text,
        }
        return self._channel.put(key, columns)

    def _gather_survivors(self, settings: Migrate) -> None:
        """Moves what is left of a step to the fewest engines that hold it, those with most to do.

        Gathered sequences are slower, so where others run on the engines' devices, not before one of them waits.
        """
        left = len(self._unfinished)
        is_tail = 0 < left <= settings.remaining_share * self._samples_per_step
        if not is_tail or self._kept is not self._drivers:
            return
        if self._shared_devices and not self._cluster.lock.is_wanted(self._shared_devices):
            return
        if any(driver.num_queued for driver in self._drivers):
            return
        by_work = sorted(self._drivers, key=lambda driver: -driver.num_running)
        held = sum(driver.kv_use for driver in by_work if driver.num_running)
        num_kept = math.ceil(max(left / settings.batch, held / settings.kv_share))
        if num_kept >= len(by_work):
            return
        self._kept = by_work[:num_kept]
        for driver in by_work[num_kept:]:
            if driver.num_running:
                driver.evacuate()
