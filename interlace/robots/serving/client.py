"""Client of the policy server, for programs without an event loop: `client.act(observation)` returns a chunk."""

import asyncio
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import InterlaceError, UserError, first_line
from interlace.core.tasks import LoopThread, cancel_tasks
from interlace.core.types import FloatArray
from interlace.robots.serving.schema import (
    CONTINUES,
    DELAY,
    INTERVENTION,
    KIND,
    LAST,
    PREFIX,
    PROMPT,
    SEED,
    Intervention,
    PolicySchema,
)
from interlace.robots.serving.wire import Message, RequestError, Value, check_length, import_msgpack, pack, unpack

if TYPE_CHECKING:
    from aiohttp import ClientSession, ClientWebSocketResponse

LARGEST_ANSWER = 64 << 20
"""Bytes."""


class ConnectionLostError(InterlaceError):
    """The connection to the policy server ended."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActionChunk:
    """Answer of the server. K = actions of a chunk, A = numbers of an action."""

    actions: FloatArray
    """[K, A]."""
    num_limited: int
    """Violations of the server's limits."""
    latency_s: float
    """Seconds from the call to the answer, with the emulated delay."""
    server_s: float
    """Seconds in the server."""


class PolicyClient:
    """Connection of one robot to a policy server. A thread keeps the connection; begin() does not wait."""

    def __init__(self, url: str, api_key: str = "", *, timeout_s: float = 30.0, delay_s: float = 0.0) -> None:
        """Connects and reads the schema. url: ws://HOST:PORT. timeout_s: of the connection and of each answer.

        delay_s: emulated delay of the network, in seconds, half of it in each direction. Raises UserError if the server
        refuses the key or cannot be reached.
        """
        import_msgpack()
        self._url, self._key, self._timeout_s, self._delay_s = url, api_key, timeout_s, delay_s
        self._session: ClientSession | None = None
        self._socket: ClientWebSocketResponse | None = None
        self._thread = LoopThread("policy client")
        self._turn = asyncio.Lock()
        """Held from a request to its answer: answers have the order of the requests."""
        self._recording = asyncio.Lock()
        """Held from the first part of an intervention to its last: the server joins parts that follow each other."""
        try:
            self.schema: PolicySchema = self._thread.run(self._connect())
        except BaseException:
            self.close()
            raise

    def act(
        self,
        observation: Mapping[str, NDArray[np.generic]],
        prompt: str | None = None,
        *,
        prefix: FloatArray | None = None,
        delay: int = 0,
        seed: int | None = None,
        last_action: FloatArray | None = None,
    ) -> ActionChunk:
        """Returns the chunk of an observation; see begin(). Raises RequestError with the server's reason."""
        future = self.begin(observation, prompt, prefix=prefix, delay=delay, seed=seed, last_action=last_action)
        return future.result()

    def begin(
        self,
        observation: Mapping[str, NDArray[np.generic]],
        prompt: str | None = None,
        *,
        prefix: FloatArray | None = None,
        delay: int = 0,
        seed: int | None = None,
        last_action: FloatArray | None = None,
    ) -> "Future[ActionChunk]":
        """Requests a chunk and returns at once. Arrays that the policy does not read are not sent.

        prompt: instruction; None if the policy knows only one. prefix: [n, A] actions of the current chunk that are not
        executed yet, of which the first `delay` are executed before the answer arrives. last_action: [A] before these.
        """
        message: dict[str, Value] = {name: observation[name] for name in self.schema.observation if name in observation}
        optional: dict[str, Value] = {PROMPT: prompt, PREFIX: prefix, SEED: seed, LAST: last_action}
        message |= {name: value for name, value in optional.items() if value is not None}
        if delay:
            message[DELAY] = delay
        return self._thread.start(self._request_chunk(message))

    def record(self, given: Intervention) -> int:
        """Sends the actions of a human. Returns the number of recorded episodes. Raises RequestError.

        An intervention that is too large for one message is sent in parts, which the server joins.
        """
        return self._thread.run(self._send_parts(self._list_parts(given)))

    def _list_parts(self, given: Intervention) -> list[Message]:
        """Returns the messages of an intervention. Raises RequestError if one tick is too large for a message."""
        arrays = {name: given.observations[name] for name in self.schema.observation if name in given.observations}
        message: dict[str, Value] = {KIND: INTERVENTION, "actions": given.actions, PROMPT: given.prompt, **arrays}
        ended = None if given.terminated is None else bool(given.terminated[-1])
        optional: dict[str, Value] = {"rewards": given.rewards, "terminated": ended, "success": given.success}
        message |= {name: value for name, value in optional.items() if value is not None}
        if given.continues:  # servers of earlier versions refuse the key
            message[CONTINUES] = True
        count, size = len(given.actions), len(pack(message))
        if size <= self.schema.max_message_bytes:
            return [message]
        if count == 1:
            raise RequestError(
                f"one action of the intervention and its observation have {size} bytes, and the server takes "
                f"{self.schema.max_message_bytes}. Send smaller pictures."
            )
        middle = count // 2
        return [*self._list_parts(given.cut(0, middle)), *self._list_parts(given.cut(middle, count))]

    async def _send_parts(self, parts: list[Message]) -> int:
        async with self._recording:
            answers = [await self._request(part) for part in parts]
        return int(np.asarray(answers[-1]["episodes"]))

    def close(self) -> None:
        """Closes the connection. Later calls have no effect."""
        if not self._thread.loop.is_closed():
            self._thread.run(self._disconnect())
            self._thread.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def _connect(self) -> PolicySchema:
        import aiohttp

        self._session = aiohttp.ClientSession(headers={"Authorization": f"Bearer {self._key}"})
        try:
            async with asyncio.timeout(self._timeout_s):
                self._socket = await self._session.ws_connect(self._url, max_msg_size=LARGEST_ANSWER)
                return PolicySchema.parse(await self._receive(), where="schema")
        except aiohttp.WSServerHandshakeError as error:
            why = "the key is not the server's" if error.status == 401 else f"it answers {error.status}"
            raise UserError(f"the policy server {self._url} refuses the connection: {why}.") from None
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise UserError(f"the policy server {self._url} cannot be reached: {first_line(error)}") from None

    async def _disconnect(self) -> None:
        await cancel_tasks(asyncio.all_tasks() - {asyncio.current_task()})
        if self._socket is not None:
            await self._socket.close()
        if self._session is not None:
            await self._session.close()

    async def _request_chunk(self, message: Message) -> ActionChunk:
        began_s = self._thread.loop.time()
        answer = await self._request(message)
        timing = answer.get("server_timing")
        spent_ms = timing.get("infer_ms") if isinstance(timing, Mapping) else None
        return ActionChunk(
            actions=np.array(answer["actions"], np.float32),
            num_limited=int(np.asarray(answer.get("limited", 0))),
            latency_s=self._thread.loop.time() - began_s,
            server_s=float(np.asarray(spent_ms or 0.0)) / 1000,
        )

    async def _request(self, message: Message) -> Message:
        """Sends a request and returns its answer. Raises RequestError with the server's reason."""
        data = pack(message)
        check_length(data, self.schema.max_message_bytes)
        async with self._turn:
            await asyncio.sleep(self._delay_s / 2)
            if self._socket is None or self._socket.closed:
                raise ConnectionLostError(f"the connection to {self._url} has ended.")
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._socket.send_bytes(data)
                    answer = await self._receive()
            except (TimeoutError, ConnectionResetError):
                await self._socket.close()  # a later answer would be taken for the next request's
                raise ConnectionLostError(f"{self._url} gave no answer within {self._timeout_s:g} s.") from None
            await asyncio.sleep(self._delay_s / 2)
            return answer

    async def _receive(self) -> Message:
        from aiohttp import WSMsgType

        assert self._socket is not None
        found = await self._socket.receive()
        if found.type is WSMsgType.BINARY:
            return unpack(found.data)
        if found.type is WSMsgType.TEXT:
            raise RequestError(str(found.data))
        reason = f" (close code {self._socket.close_code})" if self._socket.close_code else ""
        raise ConnectionLostError(f"{self._url} closed the connection{reason}.")
