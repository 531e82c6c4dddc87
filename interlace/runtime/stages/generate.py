"""The generation stage: admitted prompts become requests, engines serve them, samples leave as they finish."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np

from interlace.core.training import WeightBundle
from interlace.core.types import Request, Response, Sample, SampleKey, SamplingParams
from interlace.runtime.cluster import Cluster
from interlace.runtime.group import WorkerGroup
from interlace.runtime.stages.driver import EngineDriver, Job
from interlace.runtime.stages.stream import GENERATED, SampleChannel, Stream
from interlace.runtime.waits import Signal
from interlace.schedule.dispatch import DispatchPolicy, create_dispatch
from interlace.schedule.schedule import Schedule

EVALUATION_ORDER = -1
"""Evaluation goes before samples that have not started: the step boundary waits for it."""


class Generator:
    """All rollout instances behind one dispatch policy."""

    def __init__(
        self, cluster: Cluster, engines: Sequence[WorkerGroup[Any]], schedule: Schedule, params: SamplingParams
    ) -> None:
        self._cluster, self._params = cluster, params
        self._policy: DispatchPolicy = create_dispatch(schedule.dispatch)
        self._swapped = Signal(cluster.waits)
        self._mean_tokens, self._num_finished = float(params.max_new_tokens), 0
        self._drivers = [
            EngineDriver(
                engine,
                cluster.waits,
                on_update=schedule.on_update,
                concurrency=schedule.concurrency,
                on_swapped=self._swapped.fire,
                on_requeue=self._dispatch,
            )
            for engine in engines
        ]
        self._channel: SampleChannel | None = None

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
        self._dispatch([self._job(sample) for sample in samples])

    async def complete(self, requests: Sequence[Request]) -> list[Response]:
        """Serves requests outside the flow (evaluation); they pass no gate. Responses in the order given."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Response]] = [loop.create_future() for _ in requests]
        jobs = [
            Job(
                request=request,
                order=EVALUATION_ORDER,
                expected_tokens=self._expected(request),
                deliver=future.set_result,
            )
            for request, future in zip(requests, futures, strict=True)
        ]
        self._dispatch(jobs)
        return [await self._cluster.waits.wait_for(future, who="evaluation", what="a response") for future in futures]

    def update_weights(self, bundle: WeightBundle) -> None:
        """Gives every engine new weights; each swaps when it may."""
        for driver in self._drivers:
            driver.update_weights(bundle)

    async def swapped(self, version: int) -> None:
        """Waits until every engine serves `version` or a newer one."""
        while any(driver.version < version for driver in self._drivers):
            await self._swapped.wait(who="publication", what=f"all engines to serve version {version}")

    def cancel(self, sample: Sample) -> None:
        """Stops generating a sample that ended for another reason."""
        request = self._request(sample)
        for driver in self._drivers:
            driver.cancel(request.id)

    def _dispatch(self, jobs: Sequence[Job]) -> None:
        ready = [driver for driver in self._drivers if driver.starts_new] or self._drivers
        chosen = self._policy.assign([job.expected_tokens for job in jobs], [driver.load for driver in ready])
        for job, engine in zip(jobs, chosen, strict=True):
            ready[engine].submit(job)

    def _job(self, sample: Sample) -> Job:
        request = self._request(sample)

        def deliver(response: Response, key: SampleKey = sample.key) -> None:
            self._finished(key, response)

        return Job(request=request, order=sample.key.gid, expected_tokens=self._expected(request), deliver=deliver)

    def _request(self, sample: Sample) -> Request:
        prompt = sample.prompt
        return Request(
            uid=prompt.uid,
            sample_index=sample.key.index,
            attempt=prompt.attempt,
            prompt_ids=prompt.token_ids.tolist(),
            params=self._params,
        )

    def _expected(self, request: Request) -> float:
        return len(request.prompt_ids) + self._mean_tokens

    def _finished(self, key: SampleKey, response: Response) -> None:
        done = response.completion
        self._num_finished += 1
        self._mean_tokens += (len(done.token_ids) - self._mean_tokens) / self._num_finished
        if self._channel is None:
            raise ValueError("a sample finished before attach() named a channel")
        columns: dict[str, object] = {
            "token_ids": np.array(done.token_ids, np.int32),
            "logprobs": np.array(done.logprobs, np.float32),
            "versions": np.array(done.versions, np.int32),
            "finish_reason": done.finish_reason,
            "text": response.text,
        }
        self._channel.put(key, columns)
