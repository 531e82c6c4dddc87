"""The generation stage, which writes the turns of each row's episode as columns, and episodes of evaluations."""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from numbers import Real
from typing import cast

from interlace.core.errors import (
    EnginesBusyError,
    EpisodeFailedError,
    EpisodeLostError,
    EpisodeProcessLostError,
    RestartBudgetError,
    UserError,
)
from interlace.core.payload import PayloadStore, StoredSegments, StoredText
from interlace.core.recovery import Cause, SampleFailure, cause_of
from interlace.core.types import (
    NO_GROUP,
    Prompt,
    Request,
    Response,
    RewardResult,
    Sample,
    SampleKey,
    SamplingParams,
    Segment,
    TerminalEvent,
    renew_attempt,
)
from interlace.rewards.base import describe_error, whole
from interlace.rewards.config import TAKEN
from interlace.rollouts.base import Episode, Outcome
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.episodes.single_turn import SingleTurn
from interlace.rollouts.pool import EnginePool, settle
from interlace.rollouts.session import NO_LIMITS, EpisodeSession, SessionLimits
from interlace.rollouts.stream import GENERATED, Columns, OnFailed, SampleChannel, Stream
from interlace.rollouts.turn_record import read_reward
from interlace.rollouts.turns import turn_columns
from interlace.runtime.cluster import Cluster


class FromPool:
    """Client for a sample that was admitted to the pool."""

    def __init__(self, cluster: Cluster, pool: EnginePool) -> None:
        self._cluster, self._pool = cluster, pool

    async def __call__(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Response:
        if patience_s < math.inf and (version := self._pool.weights.drains_for) is not None:
            try:
                await asyncio.wait_for(self._pool.swapped(version, who=who), patience_s)
            except TimeoutError:
                why = f"engines finish their sequences before they take version {version} of the weights; try again."
                raise EnginesBusyError(why) from None
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        self._pool.ask(request, partial(settle, future), on_draft)
        try:
            return await self._cluster.waits.wait_for(future, who=who, what=what)
        except asyncio.CancelledError:
            self._pool.withdraw(request.id)
            raise


class GenerateStage:
    """Runs an episode for each admitted row.

    Consumes: waves of admitted rows (`generate`).
    Produces: the columns GENERATED, and `outcome` if the episode returns a reward. A row whose episode raises ends as
        `failed`. A row whose episode is lost starts again, up to LOSSES times.
    Waits for: responses of the pool, and the tools and environments of episodes.
    Released by: the responses. The stage holds no row back.
    """

    def __init__(
        self,
        cluster: Cluster,
        pool: EnginePool,
        episode: Episode,
        params: SamplingParams,
        channel: SampleChannel,
        *,
        limits: SessionLimits = NO_LIMITS,
        on_generated: Callable[[SampleKey], None],
        on_failed: OnFailed,
    ) -> None:
        """on_generated: called with each sample that ends here. on_failed: called with failed ones and the reason."""
        self._cluster, self._pool, self._params, self._channel = cluster, pool, params, channel
        self._limits = limits
        self._episode, self._is_single = episode, isinstance(episode, SingleTurn)
        self._on_generated, self._on_failed = on_generated, on_failed
        self._running: dict[SampleKey, asyncio.Task[None]] = {}
        """Running episodes by sample. Empty if each episode is one request."""

    @property
    def stream(self) -> Stream:
        return Stream(channel=self._channel).plus(*GENERATED)

    def generate(self, samples: Sequence[Sample]) -> None:
        self._pool.admit([sample.key for sample in samples], as_episodes=not self._is_single)
        if self._is_single:
            self._pool.submit(self._make_requests(samples), self._take_response)
            return
        for sample in samples:
            self._running[sample.key] = self._cluster.spawn(
                self._run(sample), name=f"episode {sample.key.gid}.{sample.key.index}"
            )

    def cancel(self, key: SampleKey) -> None:
        """Stops the generation of a sample that ended elsewhere. Its episode gets a CancelledError."""
        self._pool.cancel(key)
        if task := self._running.pop(key, None):
            task.cancel()

    def _make_requests(self, samples: Sequence[Sample]) -> list[Request]:
        """Makes one request per sample. Requests of one prompt share its array of ids."""
        return [
            Request(
                uid=sample.prompt.uid,
                owner=sample.key,
                attempt=sample.prompt.attempt,
                prompt_ids=sample.prompt.token_ids,
                params=self._params,
                may_stay=True,
            )
            for sample in samples
        ]

    def _take_response(self, response: Response) -> None:
        key = response.request.owner
        if response.failure:
            reason = f"the engine refused the request: {response.failure}"
            self._fail_sample(key, SampleFailure(reason=reason, cause=Cause.ENGINE, is_final=True))
        else:
            segments = response.segments
            text = StoredText(segments) if isinstance(segments, StoredSegments) else response.text
            self._write(key, {"segments": segments, "finish_reason": response.finish_reason, "text": text})

    def _write(self, key: SampleKey, columns: Columns) -> None:
        if self._channel.put(key, columns):
            self._on_generated(key)

    async def _run(self, sample: Sample) -> None:
        make = partial(
            EpisodeSession, self._cluster, FromPool(self._cluster, self._pool), params=self._params, limits=self._limits
        )
        found = await run_sample(self._episode, make, sample, on_lost=self._drop_turns)
        if self._running.pop(sample.key, None) is None:
            return  # cancelled, and the episode ended late
        self._pool.finish(sample.key)
        if isinstance(found, SampleFailure):
            self._fail_sample(sample.key, found)
        else:
            self._write(sample.key, self._store_content(found))

    def _drop_turns(self, session: EpisodeSession) -> None:
        self._cluster.timeline.drop_tokens(sum(len(turn.token_ids) for turn in session.turns))

    def _store_content(self, columns: Columns) -> Columns:
        """Replaces the segments and the text of an episode by references, if workers in other processes read them."""
        directory = self._cluster.mail_directory()
        if not directory or not directory.shared:
            return columns
        segments, text = cast("tuple[Segment, ...]", columns["segments"]), cast("str", columns["text"])
        stored = PayloadStore(directory.shared, is_owner=True).put_sample(segments, text)
        if stored is None:
            return columns
        return columns | {"segments": stored, "text": StoredText(stored)}

    def _fail_sample(self, key: SampleKey, failed: SampleFailure) -> None:
        if self._on_failed(key, failed):
            return
        self._channel.end(key, TerminalEvent.FAILED)
        self._on_generated(key)


class _Outside:
    """Client of a session that belongs to no sample of the flow."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def __call__(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Response:
        del patience_s  # a publication waits for the evaluation, so none delays it
        asked = [replace(request, may_continue=False)]
        [response] = await self._pool.answer(asked, who=f"{who}, {what}", on_draft=on_draft)
        return response


class Player:
    """Runs episodes outside the flow.

    Consumes: pairs of a prompt and a sample index (`play`).
    Produces: samples, which are not trained on.
    Waits for: responses of the pool, without the gate and without a budget, and the tools of episodes.
    Released by: the responses. All episodes of a call run concurrently.
    """

    def __init__(self, cluster: Cluster, pool: EnginePool, episode: Episode, limits: SessionLimits) -> None:
        self._cluster, self._pool, self._episode, self._limits = cluster, pool, episode, limits

    async def play(self, asked: Sequence[tuple[Prompt, int]], params: SamplingParams) -> list[Sample]:
        """Runs an episode for each prompt and index. `outcome` contains the episode's reward, if it returned one.

        An exception of an episode becomes the failure of its outcome. A lost episode starts again, as in the flow.
        """
        return list(await asyncio.gather(*[self._play_episode(prompt, index, params) for prompt, index in asked]))

    async def _play_episode(self, prompt: Prompt, index: int, params: SamplingParams) -> Sample:
        sample = Sample(key=SampleKey(NO_GROUP, index), prompt=prompt)
        make = partial(EpisodeSession, self._cluster, _Outside(self._pool), params=params, limits=self._limits)
        found = await run_sample(self._episode, make, sample)
        if isinstance(found, SampleFailure):
            found = Columns(outcome=RewardResult(failure=found.reason, cause=found.cause))
        return replace(sample, **found)  # type: ignore[arg-type]  # a stage's columns are untyped


async def run_sample(
    episode: Episode,
    make: Callable[..., EpisodeSession],
    sample: Sample,
    *,
    on_lost: Callable[[EpisodeSession], None] | None = None,
) -> Columns | SampleFailure:
    """Runs the episode of a sample, again after a loss. Returns the columns, or the reason why the sample failed.

    make: makes a session, from `sample` and `num_losses`. on_lost: called with the session of each lost episode.
    """
    num_losses = 0
    while True:
        session = make(sample=sample, num_losses=num_losses)
        try:
            return await run_episode(episode, session, sample.prompt)
        except EpisodeLostError as error:
            if on_lost:
                on_lost(session)
            if not session.may_begin_again:
                reason = f"{error}, {session.num_begun} times"
                return SampleFailure(reason=reason, cause=cause_of(error), is_final=True)
            sample, num_losses = _sample_after_loss(sample, error), num_losses + 1
        except RestartBudgetError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a user's episode fails only its sample
            return sample_failure(error)


def _sample_after_loss(sample: Sample, error: EpisodeLostError) -> Sample:
    """Returns the sample that begins again after the loss of its episode: with other noise if a simulator failed."""
    if isinstance(error, EpisodeProcessLostError):
        return sample
    return replace(sample, prompt=renew_attempt(sample.prompt))


async def run_episode(episode: Episode, session: EpisodeSession, prompt: Prompt) -> Columns:
    """Runs one episode and returns the columns of its sample. Raises the episode's errors, and TimeoutError.

    CancelledError is raised only if the calling task is cancelled, because it ends a task without an error. If the
    episode awaits a cancelled task or future, RuntimeError is raised instead.
    """
    session.begin()
    try:
        outcome = outcome_of(await session.limit_time(episode.run(prompt, session)))
        return turn_columns(prompt, session.turns, outcome, session.rewards, session.tool_uses)
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise RuntimeError(
            "the episode raised CancelledError: it awaited a task or a future that was cancelled"
        ) from error
    finally:
        session.close()


def sample_failure(error: Exception) -> SampleFailure:
    """Returns the failure of a sample whose episode raised an error."""
    text = describe_error(error)
    if isinstance(error, EpisodeFailedError):
        return SampleFailure(reason=text, cause=Cause(error.cause))
    return SampleFailure(reason=f"{type(error).__name__}: {text}", cause=cause_of(error))


def outcome_of(returned: object) -> Outcome:
    """Converts the result of an episode to an Outcome with plain numbers, and text that every file accepts.

    Raises TypeError unless it is a number, an Outcome or None, and its text and the names of its parts are text;
    ValueError if a reward or a part of it is no finite float32 number; UserError for a part with the name of a metric
    of all rewards.
    """
    if returned is None:
        return Outcome()
    if not isinstance(returned, Outcome):
        if not isinstance(returned, Real):
            raise TypeError(
                f"the episode returned a {type(returned).__name__}; it returns a number, an Outcome or None"
            )
        return Outcome(reward=read_reward(returned, "the episode's reward"))
    if wrong := [name for name in returned.parts if not isinstance(name, str)]:
        raise TypeError(f"the name of the episode's part {wrong[0]!r} is a {type(wrong[0]).__name__}, not a text")
    if taken := [name for name in TAKEN if name in returned.parts]:
        raise UserError(f"the episode returned a part {taken[0]!r}, and metrics have another of that name: rename it")
    if returned.text is not None and not isinstance(returned.text, str):
        raise TypeError(f"the text of the episode's Outcome is a {type(returned.text).__name__}, not a text")
    return replace(
        returned,
        reward=None if returned.reward is None else read_reward(returned.reward, "the episode's reward"),
        parts={
            whole(name): read_reward(value, f"the episode's part {name!r}") for name, value in returned.parts.items()
        },
        text=None if returned.text is None else whole(returned.text),
    )
