"""Checks of servers: they answer, return log-probs, and have the expected weights."""

import asyncio
import math
import socket
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from interlace.core.errors import InterlaceError, UserError
from interlace.core.tasks import LoopThread
from interlace.core.types import NO_GROUP, Request, SampleKey, SamplingParams
from interlace.engines.rollout.services.dialects import dialect_named, dialect_names
from interlace.engines.rollout.services.protocol import (
    UNIX,
    Address,
    Delta,
    EngineClient,
    ServiceCapacity,
    ServiceError,
)
from interlace.weights.ref import WeightProbe

HEALTH_S, ANSWER_S = 10.0, 120.0
"""Seconds for a server to answer a health check, and to serve a first request."""
COLD = SamplingParams(max_new_tokens=8, temperature=0.02)
"""Sampling under which log-probs of the sampled distribution and log-probs of the model differ much."""
UNSURE, SAME = -0.2, 0.05
"""Log-prob of the model below which a token is compared, and the largest difference of equal log-probs, in nats.

A median of differences is compared, because numerical noise may change single log-probs by more.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class WantedModel:
    """The model that servers must serve."""

    vocab_size: int
    num_tokens: int
    """Length of the longest sequence that the run requests, in tokens."""
    dtype: str
    corrects_dtype: bool
    """True if the algorithm corrects for log-probs of another data type."""
    temperature: float = 1.0
    """Temperature at which the run samples."""
    is_fixed: bool = False
    """True if the servers must serve the weights that they started with, as for a reference."""


def check_servers(addresses: Sequence[Address], dialect: str, wanted: WantedModel) -> None:
    """Raises UserError, with the address and the fix, for the first server that cannot serve the run."""
    _check_distinct([address.url for address in addresses])
    thread = LoopThread("check of engine services")
    try:
        thread.run(_check_addresses(addresses, dialect, wanted))
    finally:
        thread.close()


async def _check_addresses(addresses: Sequence[Address], dialect: str, wanted: WantedModel) -> None:
    """Checks the capacities before the requests: two addresses of one server would get two requests of one id."""
    clients = {address.url: dialect_named(dialect).connect(address, seed=0) for address in addresses}
    try:
        found = await asyncio.gather(*(_find_capacity(url, client, dialect, wanted) for url, client in clients.items()))
        seen: dict[str, str] = {}
        for url, capacity in zip(clients, found, strict=True):
            _check_model(url, capacity, wanted)
            if capacity.identity and (other := seen.setdefault(capacity.identity, url)) != url:
                raise UserError(f"rollout.urls: {other} and {url} are one server. Name each server once.")
        await asyncio.gather(*(_request_token(url, client) for url, client in clients.items()))
        if wanted.temperature != 1:
            await asyncio.gather(*(check_logprobs(client, wanted) for client in clients.values()))
    finally:
        for client in clients.values():
            await client.close()


def _check_distinct(urls: Sequence[str]) -> None:
    seen: dict[object, str] = {}
    for url in urls:
        for place in _resolve_addresses(url):
            if (other := seen.setdefault(place, url)) != url:
                raise UserError(f"rollout.urls: {other} and {url} are one server. Name each server once.")


def _resolve_addresses(url: str) -> list[object]:
    if url.startswith(UNIX):
        return [url]
    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        infos = socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(f"rollout.urls: the host of {url} is unknown: {error}. Correct the address.") from None
    return [info[4] for info in infos]


async def _find_capacity(url: str, client: EngineClient, dialect: str, wanted: WantedModel) -> ServiceCapacity:
    try:
        async with asyncio.timeout(HEALTH_S):
            version = (await client.health()).version
    except (ServiceError, TimeoutError) as error:
        known = ", ".join(dialect_names())
        raise UserError(
            f"rollout.urls: no server of dialect {dialect!r} answers at {url}: {error or 'no answer'}. "
            f"Start it, correct the address, or set rollout.dialect to the server's kind ({known})."
        ) from None
    if wanted.is_fixed and version:
        raise UserError(
            f"reference.service: {url} serves version {version} of weights that a run has loaded, and the reference "
            "stays as it was at the start. Restart the server, or name another one."
        )
    with _name_address(url):
        async with asyncio.timeout(ANSWER_S):
            return await client.capacity()


async def _request_token(url: str, client: EngineClient) -> None:
    """Requests one token and checks that its id and its log-prob arrive."""
    params = SamplingParams(max_new_tokens=1)
    request = Request(uid="check", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1, 2], params=params)
    with _name_address(url):
        async with asyncio.timeout(ANSWER_S):
            answer = await request_answer(client, request)
    if answer.refusal:
        raise UserError(f"rollout.urls: {client.name} refused a request of one token: {answer.refusal}")
    if not answer.num_ids == answer.num_logprobs == 1:
        raise UserError(
            f"rollout.urls: {client.name} answered a request of one token with {answer.num_ids} token ids and "
            f"{answer.num_logprobs} log-probs. Training needs both: start the server with its token route (vLLM: "
            "--enable-scale-out)."
        )


async def check_logprobs(client: EngineClient, wanted: WantedModel) -> None:
    """Raises UserError if a server returns log-probs of the model instead of log-probs of the sampled distribution.

    The check samples at a temperature near 0. It skips tokens of a uniform distribution, which has the same log-probs
    at each temperature.
    """
    uniform = -math.log(wanted.vocab_size)
    request = Request(uid="check of log-probs", owner=SampleKey(NO_GROUP, 0), prompt_ids=[1, 2], params=COLD)
    deltas: list[Delta] = []
    with _name_address(client.name):
        async with asyncio.timeout(ANSWER_S):
            await client.generate([request], lambda _, delta: deltas.append(delta))
            token_ids = [token for delta in deltas for token in delta.token_ids]
            [scores] = await client.score([[*request.list_prompt(), *token_ids]])
    sampled = [logprob for delta in deltas for logprob in delta.logprobs]
    pairs = zip(sampled, scores[len(scores) - len(sampled) :], strict=True)
    gaps = [abs(logprob - score) for logprob, score in pairs if score < UNSURE and abs(score - uniform) > SAME]
    if gaps and median(gaps) < SAME:
        raise UserError(
            f"rollout.urls: {client.name} returns log-probs of the model at temperature 1, and the run samples at "
            f"sampling.temperature={wanted.temperature:g}, so importance ratios would be wrong. Start the server with "
            "log-probs of the sampled distribution (vLLM: --logprobs-mode processed_logprobs)."
        )


@contextmanager
def _name_address(url: str) -> Iterator[None]:
    """Raises UserError with the address if the server fails after it answered about its health."""
    try:
        yield
    except (ServiceError, TimeoutError) as error:
        raise UserError(
            f"rollout.urls: {url} answers about its health and did not serve a request of one token: "
            f"{error or 'no answer'}. Look at the server's log."
        ) from None


def _check_model(url: str, capacity: ServiceCapacity, wanted: WantedModel) -> None:
    if capacity.vocab_size is not None and capacity.vocab_size != wanted.vocab_size:
        raise UserError(
            f"rollout.urls: {url} serves {capacity.model or 'a model'} with a vocabulary of {capacity.vocab_size} "
            f"tokens, and the recipe's model has {wanted.vocab_size}. Start the server with the recipe's model."
        )
    if capacity.context is not None and capacity.context < wanted.num_tokens:
        raise UserError(
            f"rollout.urls: {url} serves sequences of at most {capacity.context} tokens, and responses of the run have "
            f"up to {wanted.num_tokens}. Lower sampling.max_new_tokens, or start the server with a longer limit."
        )
    if capacity.dtype and capacity.dtype != wanted.dtype and not wanted.corrects_dtype:
        raise UserError(
            f"rollout.urls: {url} serves {capacity.dtype} weights, and model.dtype is {wanted.dtype}: its log-probs "
            "are of another distribution than is trained, and the algorithm does not correct for it. Start the server "
            f"with {wanted.dtype}, set model.dtype={capacity.dtype}, or algorithm.off_policy.correction=truncate."
        )


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
