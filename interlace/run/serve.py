"""Serves a model or a run's checkpoint over HTTP, without training: to sessions, and to runs as a rollout engine."""

import asyncio
import itertools
import math
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from interlace.agents.server.app import SessionServer, serving
from interlace.agents.server.body import ApiError
from interlace.core.errors import ContextFullError, UserError
from interlace.core.types import JSON, Prompt, Request, Response, Sample, SampleKey, SamplingParams
from interlace.engines.rollout.config import NativeConfig, ServedConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.protocol import RolloutEngine
from interlace.models.inputs import input_embedding
from interlace.models.loading import empty_model, load_tokenizer
from interlace.models.token_text import TokenBytes, drop_added_end
from interlace.rollouts.base import Session
from interlace.rollouts.engine_jobs import OnDraft
from interlace.rollouts.pool import EnginePool
from interlace.rollouts.rendering.load import create_renderer
from interlace.rollouts.rendering.text import longest_token
from interlace.rollouts.role_groups import RolloutGroup
from interlace.rollouts.session import EpisodeSession, SessionLimits
from interlace.run.clusters.base import run_on
from interlace.run.host import sampling_of
from interlace.run.launch_services import launch_engines
from interlace.run.recipe.config import Recipe
from interlace.runtime.cluster import Cluster
from interlace.runtime.local.cluster import LocalCluster
from interlace.schedule.schedule import Schedule

if TYPE_CHECKING:
    from aiohttp import web
    from transformers import PreTrainedTokenizerBase

    from interlace.engines.rollout.services.hosted import HostedEngine


RETRY_AFTER_S = 1.0
"""Seconds after which a client may try again while the server is paused."""
_FIRST_VISIT = -2
"""Group number of a client's first session; later numbers count down. Groups of a run have numbers above NO_GROUP."""


FOREVER_S = 1e9
"""Timeout in seconds that is never reached: an engine of this process cannot be lost."""


class SharedEngine:
    """Makes the native engine of a server available at interlace's engine routes."""

    def __init__(self, recipe: Recipe) -> None:
        self._recipe = recipe
        self.hosted: HostedEngine | None = None

    def is_possible(self, cluster: Cluster) -> bool:
        """Returns whether the server has exactly one native engine, in this process, of a model that reads tokens."""
        rollout = self._recipe.rollout
        is_native = isinstance(rollout, NativeConfig) and rollout.tensor_parallel_size == 1
        is_one = isinstance(cluster, LocalCluster) and len(cluster.place("rollout")) == 1
        return is_native and is_one and input_embedding(empty_model(self._recipe.model).config) is None

    def wrap(self, engine: RolloutEngine, recipe: Recipe) -> RolloutEngine:
        """Returns an engine for the sessions that shares the given engine with the routes."""
        from interlace.engines.rollout.engine import NativeEngine
        from interlace.engines.rollout.services.engine import ServedModel, ServiceEngine
        from interlace.engines.rollout.services.hosted import HostedEngine
        from interlace.engines.rollout.services.link import ServerLink
        from interlace.engines.rollout.services.protocol import ServiceCapacity

        assert isinstance(engine, NativeEngine)
        limits = engine.limits
        capacity = ServiceCapacity(
            model=recipe.model.path,
            vocab_size=limits.vocab_size,
            context=limits.context,
            max_running=recipe.rollout.max_running,
            dtype=recipe.model.dtype,
            seed=recipe.seed,
        )
        hosted = self.hosted = HostedEngine(engine, capacity)
        settings = ServedConfig(
            heartbeat_s=FOREVER_S, health_timeout_s=FOREVER_S, progress_s=FOREVER_S, start_s=FOREVER_S,
            probe_gap=FOREVER_S,
        )  # fmt: skip
        link = ServerLink(lambda: hosted, settings)
        link.open()
        return ServiceEngine(link, ServedModel(limits=limits, memory=engine.memory()), engine.report())

    async def onload(self) -> None:
        """Loads the engine onto its device. Requests at the routes hold no device, so that nothing else loads it."""
        if self.hosted is not None:
            await self.hosted.wake()

    def add_routes(self, app: "web.Application", key: str) -> None:
        """Registers the engine routes."""
        from interlace.engines.rollout.services.routes import EngineRoutes

        assert self.hosted is not None
        EngineRoutes(self.hosted, key).add_to(app)


@dataclass(frozen=True, kw_only=True, slots=True)
class ServeOptions:
    """Options of a server."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str | None = None
    """Key of the clients. If None, a key is generated."""
    admin_key: str | None = None
    """Key of the commands that pause the server. If None, a key is generated."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Serving:
    """Address and keys of a listening server."""

    url: str
    api_key: str
    admin_key: str


def serve(recipe: Recipe, options: ServeOptions, *, on_ready: Callable[[Serving], None], stop: asyncio.Event) -> None:
    """Serves the recipe's model until `stop` is set. Requests use the recipe's sampling parameters by default.

    on_ready: called when the server listens.
    """

    async def run(cluster: Cluster) -> None:
        await _serve(cluster, recipe, options, on_ready, stop)

    asyncio.run(run_on(recipe.cluster, Schedule(), run))


async def _serve(
    cluster: Cluster, recipe: Recipe, options: ServeOptions, on_ready: Callable[[Serving], None], stop: asyncio.Event
) -> None:
    sharing = SharedEngine(recipe)
    engines = await launch_engines(cluster, recipe, wrap=sharing.wrap if sharing.is_possible(cluster) else None)
    with cluster.waits.operation(who="server", what="onload"):
        await sharing.onload()
    sampling = await sampling_of(recipe, engines[0])
    pool = start_pool(cluster, engines, sampling)
    tokenizer = load_tokenizer(recipe.model)
    if recipe.renderer.chat_template_kwargs and not tokenizer.chat_template:
        raise UserError(
            f"renderer.chat_template_kwargs = {dict(recipe.renderer.chat_template_kwargs)}, and the tokenizer has no "
            "chat template. Name a tokenizer with one (model.tokenizer), or remove the setting."
        )
    renderer = create_renderer(tokenizer, recipe.renderer, sampling.stop_token_ids) if tokenizer.chat_template else None
    limits = SessionLimits(renderer=renderer, max_tokens=create_kind(recipe.rollout).longest_sequence())
    visitors = PoolVisitors(cluster, pool, sampling, limits)
    server = SessionServer(
        codec=TokenizerCodec(tokenizer, limits.max_tokens),
        visitors=visitors,
        control=visitors,
        add_routes=sharing.add_routes if sharing.hosted else None,
        api_key=options.api_key,
        admin_key=options.admin_key,
    )
    # A registered operation, so that an idle server does not count as a stall.
    with cluster.waits.operation(who="server", what="clients"):
        async with serving(server, options.host, options.port) as url:
            on_ready(Serving(url=url, api_key=server.api_key, admin_key=server.admin_key))
            await stop.wait()


def start_pool(cluster: Cluster, engines: Sequence[RolloutGroup], sampling: SamplingParams) -> EnginePool:
    """Starts a pool of engines whose weights never change."""
    pool = EnginePool(
        cluster,
        engines,
        Schedule(),
        samples_per_step=1,
        expected_tokens=sampling.max_new_tokens,
        on_suspended=lambda: None,
    )
    pool.start()
    return pool


class TokenizerCodec:
    """Tokenizes text prompts, without a chat template."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", max_tokens: int | None = None) -> None:
        """max_tokens: length of the longest sequence that an engine can hold."""
        self._tokenizer, self._max_tokens = tokenizer, max_tokens
        self._longest_token = longest_token(tokenizer)
        self._bytes = TokenBytes(tokenizer)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text. A text that begins with the BOS token gets no second one.

        An end token that the tokenizer adds to each text is left out: the model continues the text.
        Raises ContextFullError, before tokenization, for a text that is too long for an engine.
        """
        fewest = -(-len(text) // self._longest_token)
        if self._max_tokens is not None and fewest >= self._max_tokens:
            raise ContextFullError(
                f"the prompt has {len(text)} characters, which are at least {fewest} tokens, and an engine holds "
                f"{self._max_tokens} of one sequence. Shorten it, or raise rollout.max_tokens."
            )
        found = drop_added_end(self._tokenizer, text, list(self._tokenizer.encode(text)))
        bos = self._tokenizer.bos_token_id
        has_two = bos is not None and found[:2] == [bos, bos]
        return found[1:] if has_two and text.startswith(str(self._tokenizer.bos_token)) else found

    def spell(self, token_id: int) -> bytes:
        """Returns the bytes of a token. They may be a part of a character."""
        return self._bytes.spell(token_id)


class PoolVisitors:
    """Sessions of clients over an engine pool, and the commands that pause the server."""

    def __init__(self, cluster: Cluster, pool: EnginePool, sampling: SamplingParams, limits: SessionLimits) -> None:
        self._cluster, self._pool, self._sampling, self._limits = cluster, pool, sampling, limits
        self._numbers = itertools.count()
        self._is_paused = False

    @asynccontextmanager
    async def session(self, seed: int | None) -> AsyncIterator[Session]:
        """Opens a session. seed: seed of its sampling noise; sessions with equal seeds sample the same tokens."""
        noise = secrets.token_hex(8) if seed is None else f"seed {seed}"
        key = SampleKey(_FIRST_VISIT - next(self._numbers), 0)
        prompt = Prompt(uid=f"serve/{noise}", token_ids=np.zeros(0, np.int32), text="", answer="")
        sample = Sample(key=key, prompt=prompt)
        session = EpisodeSession(self._cluster, self._request_response, sample, self._sampling, self._limits)
        session.begin()
        try:
            yield session
        finally:
            session.close()

    async def _request_response(
        self, request: Request, *, who: str, what: str, on_draft: OnDraft | None = None, patience_s: float = math.inf
    ) -> Response:
        del what, patience_s  # the weights never change, so no wait has to be named or limited
        [response] = await self._pool.answer([request], who=who, on_draft=on_draft)
        return response

    def busy_s(self) -> float | None:
        """Returns the seconds after which a client may retry, while the server is paused; else None."""
        return RETRY_AFTER_S if self._is_paused else None

    async def command(self, verb: str) -> dict[str, JSON]:
        """Executes pause, resume or is_paused. A paused server finishes its requests and rejects new ones."""
        if verb in ("pause", "resume"):
            self._is_paused = verb == "pause"
        elif verb != "is_paused":
            raise ApiError(404, f"the verb {verb!r} is unknown: pause, resume, is_paused.")
        return {"is_paused": self._is_paused}
