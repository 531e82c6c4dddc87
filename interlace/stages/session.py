"""An episode's side of the engine pool: each model call is one request, and is recorded as a turn."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial

import numpy as np

from interlace.core.errors import UserError
from interlace.core.random import stable_hash
from interlace.core.runs import Runs
from interlace.core.types import IntArray, Request, Response, Sample, SamplingParams
from interlace.episodes.base import Turn
from interlace.runtime.cluster import Cluster
from interlace.stages.pool import EnginePool, settle


class EpisodeSession:
    """One sample's session, open from begin() to close().

    While the episode's own code runs, or awaits what only it knows, an operation is registered: no stall is declared,
    and the wait-for graph names the episode. A turn is an ordinary wait, of which the pool knows what it is for.
    """

    def __init__(self, cluster: Cluster, pool: EnginePool, sample: Sample, params: SamplingParams) -> None:
        """sample: admitted to the pool. params: the run's."""
        self.params = params
        """The run's sampling parameters, the model's stop tokens included."""
        self.name = f"episode {sample.key.gid}.{sample.key.index}"
        """Name of the episode in the wait-for graph."""
        self._cluster, self._pool, self._sample = cluster, pool, sample
        self._turns: dict[int, Turn | None] = {}
        """By number; None of those under way."""
        self._num_elsewhere = 0
        """Turns and named waits that go on now."""
        self._operation: int | None = None
        self._is_open = False

    @property
    def seed(self) -> int:
        """A number of this sample's own; see Session."""
        prompt = self._sample.prompt
        return stable_hash("episode", prompt.uid, prompt.attempt, self._sample.key.index)

    @property
    def turns(self) -> list[Turn]:
        """Turns that have ended, in order of their numbers."""
        return [turn for _, turn in sorted(self._turns.items()) if turn]

    def begin(self) -> None:
        """Opens the session: the episode's own code runs."""
        self._is_open = True
        self._register()

    def close(self) -> None:
        """Ends it; nothing more can be asked."""
        self._is_open = False
        self._unregister()

    async def generate(
        self, token_ids: Sequence[int], *, params: SamplingParams | None = None, number: int | None = None
    ) -> Turn:
        """Lets the policy go on behind `token_ids`; see Session. UserError for what is no context of a turn."""
        place = max(self._turns, default=-1) + 1 if number is None else number
        request = self._request(_context(token_ids), params or self.params, place)
        self._turns[place] = None
        future: asyncio.Future[Response] = asyncio.get_running_loop().create_future()
        with self._elsewhere():
            self._pool.submit([request], partial(settle, future))
            try:
                response = await self._cluster.waits.wait_for(future, who=self.name, what=f"turn {place}")
            except asyncio.CancelledError:
                self._pool.withdraw(request.id)
                raise
        turn = self._turns[place] = _turn(place, response)
        return turn

    @asynccontextmanager
    async def waiting(self, what: str) -> AsyncIterator[None]:
        """Names what the episode waits for inside; see Session."""
        with self._elsewhere():
            async with self._cluster.waiting(self.name, what):
                yield

    def _request(self, context: IntArray, params: SamplingParams, place: int) -> Request:
        if not self._is_open:
            raise RuntimeError(f"{self.name} has ended; its session gives no more turns")
        if place < 0 or place in self._turns:
            raise UserError(f"turn {place} of {self.name} was asked for before. Give each call a number of its own.")
        prompt = self._sample.prompt
        return Request(
            uid=prompt.uid,
            owner=self._sample.key,
            attempt=prompt.attempt,
            turn=place,
            prompt_ids=context.tolist(),
            params=params,
        )

    @contextmanager
    def _elsewhere(self) -> Iterator[None]:
        self._num_elsewhere += 1
        self._unregister()
        try:
            yield
        finally:
            self._num_elsewhere -= 1
            if self._is_open and not self._num_elsewhere:
                self._register()

    def _register(self) -> None:
        self._operation = self._cluster.waits.begin(self.name, "its own code", self._cluster.clock.now())

    def _unregister(self) -> None:
        if self._operation is not None:
            self._cluster.waits.end(self._operation)
            self._operation = None


def _context(token_ids: Sequence[int]) -> IntArray:
    try:
        found = np.asarray(token_ids)
    except ValueError:  # lists of several lengths
        found = np.zeros((0, 0))
    if found.ndim != 1 or not found.size or found.dtype.kind not in "iu" or found.min() < 0:
        raise UserError(
            f"generate() was given a {type(token_ids).__name__} that is no list of token ids. It takes the whole "
            "context, one token at least."
        )
    return found.astype(np.int32)


def _turn(number: int, response: Response) -> Turn:
    done = response.completion
    return Turn(
        number=number,
        prompt_ids=np.asarray(done.request.prompt_ids, np.int32),
        token_ids=np.asarray(done.token_ids, np.int32),
        logprobs=np.asarray(done.logprobs, np.float32),
        versions=Runs.of(done.versions),
        finish_reason=done.finish_reason,
        text=response.text,
    )
