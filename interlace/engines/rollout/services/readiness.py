"""Checks of a server before it serves: it answers, returns log-probs, and has the expected weights."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from interlace.core.errors import InterlaceError, UserError
from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout.services.protocol import Delta, EngineClient, ServiceError
from interlace.weights.ref import WeightProbe

T = TypeVar("T")

LOOK_EVERY_S = 0.25
"""Seconds between two health checks of a starting server, and two looks at its process."""
DYING_S = 1.0
"""Seconds for a process to end after its connection broke."""
WARM_UP = SamplingParams(max_new_tokens=2)


async def run_unless_faulty(work: Coroutine[Any, Any, T], fault: Callable[[], InterlaceError | None]) -> T:
    """Runs work that needs a server's process, and raises the reason why the process does not run any more.

    fault: returns the reason, or None. If the work fails, the process gets DYING_S to end, because a connection breaks
    before its process ends, and the reason of the process is raised.
    """
    task = asyncio.ensure_future(work)
    try:
        while not (await asyncio.wait({task}, timeout=LOOK_EVERY_S))[0]:
            if (found := fault()) is not None:
                raise found
        error, deadline_s = task.exception(), time.monotonic() + DYING_S
        while isinstance(error, ServiceError | OSError) and time.monotonic() < deadline_s:
            if (found := fault()) is not None:
                raise found from error
            await asyncio.sleep(LOOK_EVERY_S)
        return task.result()
    finally:
        task.cancel()


async def wait_until_healthy(client: EngineClient, *, start_s: float, patience_s: float) -> None:
    """Waits until a starting server answers.

    start_s: seconds after which ServiceError is raised. patience_s: time limit of one health check, in seconds.
    """
    deadline = time.monotonic() + start_s
    while True:
        try:
            async with asyncio.timeout(patience_s):
                await client.health()
            return
        except (ServiceError, TimeoutError) as error:
            if time.monotonic() > deadline:
                raise ServiceError(f"{client.name} is not ready: {describe_error(error)}") from error
        await asyncio.sleep(LOOK_EVERY_S)


async def warm_up(client: EngineClient, number: int) -> None:
    """Sends a small request. number: makes the request's id unique. Raises UserError if the answer has no log-probs."""
    request = Request(uid="warm-up", owner=SampleKey(NO_GROUP, number), prompt_ids=[1], params=WARM_UP)
    answer = await request_answer(client, request)
    if answer.refusal:
        raise UserError(f"{client.name} refused a warm-up request: {answer.refusal}")
    if not answer.num_ids or answer.num_logprobs != answer.num_ids:
        raise UserError(
            f"{client.name} answered a warm-up request with {answer.num_ids} token ids and {answer.num_logprobs} "
            "log-probs, and training needs both. Take a server with a token route, and set rollout.dialect to it."
        )


class AnswerSize(NamedTuple):
    """Size of the answer to one request."""

    refusal: str
    """Reason of a refusal, or an empty text."""
    num_ids: int
    num_logprobs: int


async def request_answer(client: EngineClient, request: Request) -> AnswerSize:
    """Sends a request, and returns the size of its answer."""
    deltas: list[Delta] = []
    await client.generate([request], lambda _, delta: deltas.append(delta))
    refusal = next((delta.refusal for delta in deltas if delta.refusal), "")
    return AnswerSize(
        refusal, sum(len(delta.token_ids) for delta in deltas), sum(len(delta.logprobs) for delta in deltas)
    )


async def check_probe(client: EngineClient, probe: WeightProbe, version: int, *, max_gap: float) -> None:
    """Compares the server's log-probs of a fixed text with the trainer's.

    max_gap: largest mean difference, in nats. Raises ServiceError if the server exceeds it.
    """
    [found] = await client.score([probe.token_ids])
    gaps = [abs(one - other) for one, other in zip(found, probe.logprobs, strict=True)]
    gap = sum(gaps) / max(1, len(gaps))
    if not gap <= max_gap:  # True for NaN too.
        raise ServiceError(
            f"its log-probs of a fixed text differ by {gap:.3g} nats on average from the trainer's under version "
            f"{version}, and rollout.probe_gap is {max_gap:g}: it serves other weights"
        )


def describe_error(error: BaseException) -> str:
    """Returns the text of an error, or its type if it has none."""
    return str(error) or type(error).__name__
