"""Server of a policy over WebSocket: it sends the schema, then answers each request with a chunk of actions.

It has the messages of openpi's policy server, so that openpi's client works unchanged. An error is a text message,
after which the connection stays open.
"""

import asyncio
import secrets
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from interlace.core.errors import UserError, first_line
from interlace.core.types import JSON, FloatArray
from interlace.robots.datasets.episodes import RecordedEpisode
from interlace.robots.datasets.lerobot_write import LeRobotWriter
from interlace.robots.serving.limits import ActionLimiter, LimitCounts, SafetyLimits
from interlace.robots.serving.policy import ServedPolicy
from interlace.robots.serving.schema import (
    ActRequest,
    Intervention,
    PolicySchema,
    join_parts,
    read_act,
    read_intervention,
    read_kind,
)
from interlace.robots.serving.wire import Message, RequestError, check_length, import_msgpack, pack, unpack
from interlace.runtime.http_listener import HttpListener, is_same_key

if TYPE_CHECKING:
    from aiohttp import web

HARD_LIMIT = 4
"""Size of a message, in multiples of the schema's limit, above which the server closes the connection. A smaller one is
answered with an error."""
KEPT_LATENCIES = 4096
LONGEST_ERROR = 2000
"""Characters of an error, which may quote the robot's message."""
SCHEMES = ("Bearer ", "Api-Key ")
"""Forms of a key in the header Authorization; the second one is openpi's."""


@dataclass(slots=True)
class ServerStats:
    """Counts of a server since its start."""

    requests: int = 0
    errors: int = 0
    interventions: int = 0
    robots: int = 0
    """Open connections."""
    limited: LimitCounts = field(default_factory=LimitCounts)
    latencies_s: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT_LATENCIES))
    """Seconds of the last chunks, from the request's arrival to the answer."""

    def as_json(self) -> dict[str, JSON]:
        """Returns the counts, and the quantiles of the latency in seconds."""
        found: dict[str, JSON] = {
            "requests": self.requests,
            "errors": self.errors,
            "interventions": self.interventions,
            "robots": self.robots,
            "limited": {
                "bounds": self.limited.bounds,
                "change": self.limited.change,
                "not_finite": self.limited.not_finite,
            },
        }
        if self.latencies_s:
            median, late = np.quantile(list(self.latencies_s), [0.5, 0.99])
            found |= {"latency_p50_s": float(median), "latency_p99_s": float(late)}
        return found


class InterventionRecorder:
    """Writes each intervention as one episode of a LeRobotDataset. The column `action.expert` marks its actions as
    demonstrated. The data set is complete after each episode.
    """

    def __init__(self, folder: Path, *, fps: float, robot_type: str | None = None) -> None:
        """Raises UserError if the folder contains files, or pyarrow is missing."""
        self._writer = LeRobotWriter(folder, fps=fps, robot_type=robot_type)
        self._lock = threading.Lock()
        self.num_episodes = 0

    def add(self, given: Intervention) -> int:
        """Adds an intervention, and returns the number of episodes. May be called from several threads.

        Raises UserError if its columns differ from the first one's: all have rewards, ends and success, or none.
        """
        episode = RecordedEpisode(
            instruction=given.prompt,
            observations=given.observations,
            actions=given.actions,
            shown=given.actions,
            rewards=given.rewards,
            terminated=given.terminated,
            success=given.success,
        )
        with self._lock:
            self._writer.add(episode)
            self._writer.finish()
            self.num_episodes += 1
            return self.num_episodes


class PolicyServer:
    """Serves one policy to robots, in this process's event loop, from start() to close()."""

    def __init__(
        self,
        policy: ServedPolicy,
        *,
        api_key: str | None = None,
        limits: SafetyLimits | None = None,
        recorder: InterventionRecorder | None = None,
    ) -> None:
        """api_key: key of the robots; if None, a key is generated. limits: a bound that they do not set is the bound of
        the policy's actions. recorder: if None, interventions are refused. Raises UserError for limits of another
        action.
        """
        self.api_key = api_key or f"robot-{secrets.token_urlsafe(24)}"
        self.stats = ServerStats()
        schema = policy.schema
        given = limits or SafetyLimits()
        self._limits = given.model_copy(update={"low": given.low or schema.low, "high": given.high or schema.high})
        self._limits.check_size(schema.size)
        self.schema: PolicySchema = schema.model_copy(
            update={"applied_limits": limits and self._limits, "records_interventions": recorder is not None}
        )
        self._policy, self._recorder = policy, recorder
        self._deadline_s = self._limits.watchdog_s
        self._listener = HttpListener()

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Starts to listen, and returns the WebSocket's address. Raises UserError if the server cannot listen."""
        try:
            from aiohttp import web
        except ImportError:
            raise UserError("the policy server needs aiohttp: pip install 'interlace[robot-edge]'.") from None
        import_msgpack()
        app = web.Application()
        app.router.add_get("/", self._serve_robot)
        app.router.add_get("/schema", self._show_schema)
        app.router.add_get("/stats", self._show_stats)
        app.router.add_get("/healthz", self._show_health)
        return (await self._listener.start(app, host, port)).replace("http://", "ws://")

    async def close(self) -> None:
        """Closes all connections and stops listening."""
        await self._listener.close()

    async def answer(self, data: bytes, parts: list[Intervention]) -> Message:
        """Answers one request. Raises RequestError if it does not fit the schema, and UserError if the policy fails.

        parts: earlier parts of the connection's intervention, which this method changes.
        """
        began_s = time.perf_counter()
        try:
            check_length(data, self.schema.max_message_bytes)
            message = unpack(data)
            kind = read_kind(message)
        except RequestError:
            parts.clear()  # the message may have been the next part
            raise
        if kind == "intervention":
            return await self._record(message, parts)
        request = read_act(message, self.schema)
        chunk = await self._ask_policy(request)
        limiter = ActionLimiter(self._limits, self.schema.size, request.last_action, self.stats.limited)
        if request.delay:  # the robot has limited the committed actions already
            limiter.previous = request.prefix[request.delay - 1]
        before = limiter.counts.num_violations
        limited = limiter.limit_chunk(chunk[request.delay :])
        latency_s = time.perf_counter() - began_s
        self.stats.latencies_s.append(latency_s)
        return {
            "actions": np.concatenate([chunk[: request.delay], limited]),
            "limited": limiter.counts.num_violations - before,
            "server_timing": {"infer_ms": 1000 * latency_s},
        }

    async def _ask_policy(self, request: ActRequest) -> FloatArray:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._policy.act(request)
        except TimeoutError:
            raise RequestError(f"the policy gave no chunk within {self._deadline_s:g} s (watchdog_s).") from None

    async def _record(self, message: Message, parts: list[Intervention]) -> Message:
        """Records an intervention when its last part arrives. After an error no part of it is recorded."""
        earlier = parts[:]
        parts.clear()
        if self._recorder is None:
            raise RequestError("this server records no interventions: start it with policy.record=FOLDER.")
        given = read_intervention(message, self.schema)
        if given.continues:
            parts += [*earlier, given]
            return {"recorded": 0, "episodes": self._recorder.num_episodes}
        given = join_parts([*earlier, given])
        number = await asyncio.to_thread(self._recorder.add, given)
        self.stats.interventions += 1
        return {"recorded": len(given.actions), "episodes": number}

    async def _serve_robot(self, request: "web.Request") -> "web.StreamResponse":
        from aiohttp import WSMsgType, web

        if not is_same_key(_read_key(request), self.api_key):
            return web.Response(status=401, text="this needs the server's key: Authorization: Bearer KEY\n")
        largest = HARD_LIMIT * self.schema.max_message_bytes
        socket = web.WebSocketResponse(max_msg_size=largest, compress=False)
        if not socket.can_prepare(request):
            return web.Response(status=426, text="this address is a WebSocket; /schema describes its messages\n")
        await socket.prepare(request)
        self.stats.robots += 1
        parts: list[Intervention] = []
        try:
            await socket.send_bytes(pack(self.schema.model_dump(mode="json")))
            async for message in socket:
                if message.type is WSMsgType.BINARY:
                    await self._reply(socket, message.data, parts)
                elif message.type is WSMsgType.TEXT:
                    self.stats.errors += 1
                    await socket.send_str("the request is text: send a map in msgpack, as binary data.")
        except ConnectionResetError:  # the robot has gone
            pass
        finally:
            self.stats.robots -= 1
        return socket

    async def _reply(self, socket: "web.WebSocketResponse", data: bytes, parts: list[Intervention]) -> None:
        """Answers a message; any error becomes a text."""
        self.stats.requests += 1
        try:
            answer = pack(await self.answer(data, parts))
        except Exception as error:  # noqa: BLE001 - the robot gets the reason, and the server continues
            self.stats.errors += 1
            text = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {first_line(error)}"
            await socket.send_str(text[:LONGEST_ERROR])
            return
        await socket.send_bytes(answer)

    async def _show_schema(self, request: "web.Request") -> "web.Response":
        return self._show(request, self.schema.model_dump(mode="json"))

    async def _show_stats(self, request: "web.Request") -> "web.Response":
        return self._show(request, self.stats.as_json())

    def _show(self, request: "web.Request", content: dict[str, JSON]) -> "web.Response":
        from aiohttp import web

        if not is_same_key(_read_key(request), self.api_key):
            return web.json_response({"error": "this needs the server's key"}, status=401)
        return web.json_response(content)

    async def _show_health(self, request: "web.Request") -> "web.Response":
        from aiohttp import web

        del request
        return web.Response(text="OK\n")


def _read_key(request: "web.Request") -> str:
    given = request.headers.get("Authorization", "")
    for scheme in SCHEMES:
        given = given.removeprefix(scheme)
    return given.strip() or request.headers.get("x-api-key", "")
