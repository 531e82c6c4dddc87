"""Scores samples: in separate processes, on a thread, or on an event loop; each call under a time limit."""

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from interlace.core.errors import UserError
from interlace.core.messages import to_mapping
from interlace.core.types import JSON, NO_GROUP, Prompt, RewardResult, Sample, SampleKey
from interlace.rewards.base import (
    WRONG_TYPE,
    LoadedReward,
    add_turn_rewards,
    evaluate_batch,
    evaluate_batch_async,
    load_rewards,
    make_timeout_result,
)
from interlace.rewards.config import RewardConfig, reward_names
from interlace.rewards.given import is_given
from interlace.rewards.pool import ScoringPool
from interlace.rewards.shaping import shape_result
from interlace.rewards.signature import CHAT, MARKS_A_BATCH, ScoreRequest
from interlace.runtime.local.own_thread import OwnThread

CALLS_AT_ONCE = 16
"""Calls that are awaited at once if `workers` is 0."""
_BEAT_S = 0.05
"""Seconds between two signs of life of the event loop."""
SOON_S = 0.01
"""Seconds after which the results so far are handed out."""

_ROW_OF_A_TABLE = re.compile(
    r"(?:.+?/)?(?:train|heldout)/(.+?)(?:\.(?:jsonl|json|csv|tsv|parquet))?:\d+", re.IGNORECASE
)
"""Uid of a prompt from a table: the purpose and the source, if any, then the split, the table and the row's number."""


class Scorer:
    """Scores responses by the configured functions. Processes start with the first call and end with `close`."""

    def __init__(self, config: RewardConfig, restarts_per_hour: int | None = None) -> None:
        """restarts_per_hour: of the processes; None for no limit. Raises UserError if there is no such reward."""
        self._config, self._restarts_per_hour = config, restarts_per_hour
        self._reward = load_rewards(config)
        self._in_this_process = is_given(config) or not (self._reward.is_async or config.workers)
        self._pool: ScoringPool | None = None
        self._loop: OwnLoop | None = None
        self._thread: OwnThread | None = None
        self._asked: deque[_Asked] = deque()
        """Calls that the thread is to make, in turn."""
        self._server: asyncio.Task[None] | None = None

    async def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """Returns one result a sample, in their order. A function that raises or is too slow fails its sample alone."""
        requests = [_make_request(sample, self._reward) for sample in samples]
        # A function of a batch gets the samples of one call together; else each sample has its own time limit.
        jobs = [requests] if self._reward.is_batched and requests else [[request] for request in requests]
        found = await self._score_jobs(jobs)
        results = [result for batch in found for result in batch]
        shaping = self._config.shaping
        return [
            shape_result(add_turn_rewards(result, sample.outcome), sample.sampled_ids, shaping)
            for result, sample in zip(results, samples, strict=True)
        ]

    def close(self) -> None:
        """Ends the processes with their calls. A second call does nothing."""
        if self._pool is not None:
            self._pool.close()
        if self._loop is not None:
            self._loop.close()
        if self._server is not None:
            self._server.cancel()
        if self._thread is not None:
            self._thread.end()
        self._pool = self._thread = self._loop = None

    async def _score_jobs(self, jobs: Sequence[Sequence[ScoreRequest]]) -> list[list[RewardResult]]:
        if not jobs:
            return []
        if not self._in_this_process:
            self._pool = self._pool or ScoringPool(
                self._config,
                is_async=self._reward.is_async,
                shares_process=self._reward.is_all_async,
                restarts_per_hour=self._restarts_per_hour,
            )
            return list(await asyncio.gather(*[asyncio.wrap_future(self._pool.submit(job)) for job in jobs]))
        if not self._reward.is_async:
            return await self._on_thread(jobs)
        if self._loop is None or self._loop.is_blocked:
            self._loop = OwnLoop(self._reward, self._config)
        return list(await asyncio.gather(*[self._loop.score(job) for job in jobs]))

    async def _on_thread(self, jobs: Sequence[Sequence[ScoreRequest]]) -> list[list[RewardResult]]:
        loop = asyncio.get_running_loop()
        mine = [_Asked(job, loop.create_future()) for job in jobs]
        self._asked.extend(mine)
        if self._server is None or self._server.done():
            self._server = asyncio.create_task(self._serve_calls(), name="scorer")
        return list(await asyncio.gather(*(each.result for each in mine)))

    async def _serve_calls(self) -> None:
        """Has the thread score until nothing is asked for: one trip to it for all calls that wait, since each costs
        more than a quick answer does.
        """
        while self._asked:
            asked = [each for each in self._asked if not each.result.done()]  # else its caller has gone
            self._asked.clear()
            try:
                while asked:
                    asked = asked[await self._score(asked) :]
            except BaseException as error:
                is_end = not isinstance(error, Exception)
                for each in (*asked, *self._asked) if is_end else asked:
                    each.fail(error)
                if is_end:
                    raise

    async def _score(self, asked: "Sequence[_Asked]") -> int:
        """Scores on the thread up to the first that is too slow. Returns how many have their results."""
        thread = self._thread = self._thread or OwnThread("reward")
        work = _Work(self._reward, self._config, [each.requests for each in asked])
        done = asyncio.wrap_future(thread.submit(work.run))
        num_scored = 0
        while not done.done() and work.left_s() > 0:
            await asyncio.wait({done}, timeout=min(work.left_s(), SOON_S))
            num_scored = _deliver_results(asked, work.results, num_scored)
        work.is_over = True
        if done.done():
            done.result()  # raises the error of the thread
            return _deliver_results(asked, work.results, num_scored)
        self._thread = None
        thread.interrupt()
        if len(work.results) == num_scored:  # else it was done with the late one just now
            work.results.append([make_timeout_result(self._config)] * len(asked[num_scored].requests))
        return _deliver_results(asked, work.results, num_scored)


@dataclass(slots=True)
class _Asked:
    """A call and its results to come."""

    requests: Sequence[ScoreRequest]
    result: "asyncio.Future[list[RewardResult]]"

    def fail(self, error: BaseException) -> None:
        """Raises an error in the code that awaits the result."""
        if isinstance(error, asyncio.CancelledError):
            self.result.cancel()
        elif not self.result.done():
            self.result.set_exception(error)


def _deliver_results(asked: Sequence[_Asked], results: Sequence[list[RewardResult]], num_delivered: int) -> int:
    """Hands out further results. Returns how many are out."""
    found = results[num_delivered:]  # a copy: the thread adds more
    for each, result in zip(asked[num_delivered:], found, strict=False):
        if not each.result.done():
            each.result.set_result(result)
    return num_delivered + len(found)


@dataclass(slots=True)
class _Work:
    """Calls that a thread makes one after another."""

    reward: LoadedReward
    config: RewardConfig
    jobs: Sequence[Sequence[ScoreRequest]]
    results: list[list[RewardResult]] = field(default_factory=list)
    """Results of the first calls, so far."""
    since_s: float = 0.0
    """When the current one began."""
    is_over: bool = False
    """Flag: further results are dropped."""

    def run(self) -> None:
        for job in self.jobs:
            self.since_s = time.monotonic()
            results = evaluate_batch(self.reward, self.config, job)
            if self.is_over:
                return
            self.results.append(results)

    def left_s(self) -> float:
        used_s = time.monotonic() - self.since_s if self.since_s else 0.0
        return max(0.0, self.config.timeout_s - used_s)


def _make_request(sample: Sample, reward: LoadedReward) -> ScoreRequest:
    """Returns the inputs of a reward for a sample. Messages and tokens are copied only if the reward names them."""
    prompt = sample.prompt
    needs_messages = reward.names("messages") or (prompt.is_chat and any(map(reward.names, MARKS_A_BATCH)))
    return ScoreRequest(
        prompt=prompt.text,
        response=sample.text,
        answer=prompt.answer,
        metadata=prompt.metadata,
        messages=_list_messages(prompt) if needs_messages else (),
        completion_ids=tuple(sample.sampled_ids.tolist()) if reward.names("completion_ids") else (),
        source=_source_of(prompt),
        is_chat=prompt.is_chat,
    )


def _list_messages(prompt: Prompt) -> tuple[Mapping[str, JSON], ...]:
    """Returns the messages of a prompt as its author wrote them; of plain text, one message of the user."""
    chat = prompt.metadata.get(CHAT) if prompt.is_chat else None  # a text may have another column of this name
    if isinstance(chat, list | tuple):
        return tuple(each for each in chat if isinstance(each, Mapping))
    written = tuple(to_mapping(message) for message in prompt.messages)
    return written or ({"role": "user", "content": prompt.text},)


def _source_of(prompt: Prompt) -> str:
    """Returns the name of a prompt's data set, such as `openai/gsm8k`; of a file, its name without the ending."""
    own = prompt.metadata.get("source_dataset")
    if isinstance(own, str):
        return own
    found = _ROW_OF_A_TABLE.fullmatch(prompt.uid)
    return found[1] if found else prompt.uid


async def try_reward(config: RewardConfig | None, prompt: Prompt) -> None:
    """Scores the answer of a prompt as if it were a response. Raises UserError if the value is not a reward.

    An exception, or a time limit that is exceeded, is no reason to stop: other responses may be scored. Built-ins are
    not tried.
    """
    if config is None or config.model is not None or not any(":" in name for name in reward_names(config)):
        return
    response = prompt.answer if config.tag is None else f"<{config.tag}>{prompt.answer}</{config.tag}>"
    scorer = Scorer(config)
    try:
        [result] = await scorer.score([Sample(key=SampleKey(NO_GROUP, 0), prompt=prompt, text=response)])
    finally:
        scorer.close()
    if result.failure is not None and result.failure.startswith(WRONG_TYPE):
        raise UserError(f"{result.failure.removeprefix(WRONG_TYPE)}.")


class OwnLoop:
    """An event loop in a thread. A function that blocks it fails its samples; the thread is then abandoned."""

    def __init__(self, reward: LoadedReward, config: RewardConfig) -> None:
        self._reward, self._config = reward, config
        self._room = asyncio.Semaphore(config.workers or CALLS_AT_ONCE)
        self._loop = asyncio.new_event_loop()
        self._beat_s = time.monotonic()
        threading.Thread(target=self._run, name="async reward", daemon=True).start()

    @property
    def is_blocked(self) -> bool:
        """Returns whether a call has blocked the loop for longer than a call may take."""
        return time.monotonic() - self._beat_s > self._config.timeout_s + 1.0

    async def score(self, requests: Sequence[ScoreRequest]) -> list[RewardResult]:
        """Returns one result for each request, from any event loop."""
        scoring = asyncio.run_coroutine_threadsafe(self._score(requests), self._loop)
        done = asyncio.wrap_future(scoring)
        while not done.done():
            await asyncio.wait({done}, timeout=4 * _BEAT_S)
            if self.is_blocked:
                done.cancel()
                late = make_timeout_result(self._config).failure
                reason = f"{late}: an async reward blocked its event loop, it must await"
                return [RewardResult(failure=reason)] * len(requests)
        return done.result()

    def close(self) -> None:
        """Ends the loop with the calls that it still awaits."""
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_soon(self._beat)
        self._loop.run_forever()
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    def _beat(self) -> None:
        self._beat_s = time.monotonic()
        self._loop.call_later(_BEAT_S, self._beat)

    async def _score(self, requests: Sequence[ScoreRequest]) -> list[RewardResult]:
        async with self._room:
            scoring = asyncio.ensure_future(evaluate_batch_async(self._reward, self._config, requests))
            done, _ = await asyncio.wait({scoring}, timeout=self._config.timeout_s)
            if done:
                return scoring.result()
            scoring.cancel()
            return [make_timeout_result(self._config)] * len(requests)
