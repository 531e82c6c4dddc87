"""The process that scores: takes requests from a socket, and answers each with a line of JSON.

Requests come as pickles, since metadata may hold values that JSON does not have. Answers do not: code that a model
wrote may have run here, and its messages must not run in the process that reads them.
"""

import asyncio
import contextlib
import importlib
import json
import os
import pickle
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from interlace.core.types import RewardResult
from interlace.rewards.base import (
    LoadedReward,
    describe_error,
    evaluate_batch,
    evaluate_batch_async,
    load_rewards,
    make_timeout_result,
    memory_limit_mib,
    preload_modules,
)
from interlace.rewards.config import RewardConfig
from interlace.rewards.signature import ScoreRequest
from interlace.runtime.process.child import LoopServer, become_child, receive_frame

READY, STARTED, RESULT, BLOCKED, UNREADABLE = "ready", "started", "result", "blocked", "unreadable"
"""First words of an answer: can score; request N begins; request N's result; request N blocks the event loop; request N
cannot be unpickled."""
_LEAVE_S = 0.5
"""How long a cancelled call may take to end before the process counts as littered."""


def serve(connection: socket.socket, config: RewardConfig, is_async: bool) -> None:
    """Runs in the process until the run closes the connection or ends."""
    become_child()
    reward = load_rewards(config)
    for module in preload_modules(config):
        importlib.import_module(module)
    if limit_mib := memory_limit_mib(config):
        _limit_memory(limit_mib)
    # A run that closed the connection has nothing left to ask.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError, EOFError):
        channel = _Answers(connection)
        channel.send(READY)
        if is_async:
            _AsyncServer(connection, channel, reward, config).run()
        while True:
            number, body = receive_frame(connection)
            try:
                requests = pickle.loads(body)
            except Exception as error:  # noqa: BLE001 - it is the request's failure
                channel.refuse(number, error)
                continue
            channel.send(STARTED, number)
            channel.result(number, evaluate_batch(reward, config, requests))


def _limit_memory(mebibytes: int) -> None:
    """Limits the process to its present memory and `mebibytes` more: a call that needs more raises MemoryError."""
    import resource

    used = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (mebibytes << 20), resource.RLIM_INFINITY))


class _Answers:
    """Lines to the run, each sent whole, from any thread."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._writing = connection, threading.Lock()

    def send(self, *words: object) -> None:
        line = json.dumps(words).encode() + b"\n"
        with self._writing:
            self._connection.sendall(line)

    def result(self, number: int, results: Sequence[RewardResult]) -> None:
        """Sends the results of a job, one for each of its requests."""
        self.send(RESULT, number, [(each.reward, dict(each.parts), each.failure, each.cause) for each in results])

    def refuse(self, number: int, error: Exception) -> None:
        """Sends the reason why a job cannot be unpickled."""
        self.send(UNREADABLE, number, f"{type(error).__name__}: {describe_error(error)}")


class _AsyncServer(LoopServer):
    """Awaits calls of an `async def`, as many at once as the run sends.

    A call that takes too long is cancelled; if it ignores that, it is abandoned, and the process ends after its
    other calls. A call that blocks the event loop is named by a thread that watches, and the run ends
    the process.
    """

    def __init__(
        self, connection: socket.socket, answers: _Answers, reward: LoadedReward, config: RewardConfig
    ) -> None:
        super().__init__(connection, config.timeout_s)
        self._answers, self._reward, self._config = answers, reward, config
        self._numbers: dict[asyncio.Task[Any], int] = {}
        """Request numbers of the tasks that score."""
        self._open: set[asyncio.Task[None]] = set()
        self._left_behind = False

    def _heard(self, number: int, requests: Sequence[ScoreRequest]) -> None:
        task = self._loop.create_task(self._score(number, requests))
        self._open.add(task)
        task.add_done_callback(self._open.discard)

    def _refuse(self, number: int, error: Exception) -> None:
        self._answers.refuse(number, error)

    async def _score(self, number: int, requests: Sequence[ScoreRequest]) -> None:
        scoring = self._loop.create_task(evaluate_batch_async(self._reward, self._config, requests))
        self._numbers[scoring] = number
        self._answers.send(STARTED, number)
        done, _ = await asyncio.wait({scoring}, timeout=self._config.timeout_s)
        if not done:
            scoring.cancel()
        self._answers.result(number, scoring.result() if done else [make_timeout_result(self._config)] * len(requests))
        if not done:
            left, _ = await asyncio.wait({scoring}, timeout=_LEAVE_S)
            self._left_behind |= not left
        self._numbers.pop(scoring, None)
        if self._left_behind and len(self._open) == 1:
            os._exit(0)  # the run starts another one, and sends the other calls again

    def _report_blocked_loop(self, task: asyncio.Task[Any] | None, line: str) -> None:
        # If a task of the function blocks, the run notices at its limit and tries the calls one by one.
        if task in self._numbers:
            self._answers.send(BLOCKED, self._numbers[task], line)
