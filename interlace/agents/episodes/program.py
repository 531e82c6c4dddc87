"""Episode that runs a program: a command or a function with the address and key of its session."""

import asyncio
import contextlib
import functools
import inspect
import json
import os
import re
import signal
import sys
from collections.abc import Awaitable, Mapping
from dataclasses import replace
from typing import Literal, Self, cast

from pydantic import Field, JsonValue, model_validator

from interlace.agents.episodes.program_groups import program_groups
from interlace.agents.server.app import SessionAddress
from interlace.agents.server.conversation import Conversation
from interlace.agents.server.host import PATIENCE_S, SessionHost
from interlace.agents.tools.function import on_thread
from interlace.core.errors import InterlaceError, UserError
from interlace.core.json_values import copy_json
from interlace.core.messages import ToolSpec, as_tool, to_mapping
from interlace.core.plugins import load_callable, load_object
from interlace.core.processes import end_command_with_parent, is_start_failure
from interlace.core.types import JSON, Prompt
from interlace.rollouts.base import Episode, Outcome, Session
from interlace.rollouts.config import EpisodeConfig, EpisodeKind

_SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)
_ERROR_CHARACTERS = 400
REST_WITHIN_S = 1.0
"""Maximum time, in seconds, in which the rest of a command's output is read after its end. Less than LEAVE_S of episode
processes: a cancelled program must end before its process is replaced."""


class ProgramConfig(EpisodeConfig):
    """Settings of `program`: `command` or `function`."""

    command: tuple[str, ...] = ()
    """Command and its arguments; `{column}` in an argument is replaced by the row's value, `{prompt}` by the question's
    text. `python` is the interpreter that runs interlace. The row is passed as JSON on standard input."""
    function: str | None = None
    """Your function as package.module:function, called as function(row, base_url, api_key): a mapping and two texts. A
    sync function runs on a thread, which cannot be stopped; after its time limit its requests are refused."""
    result: Literal["text", "exit"] = "text"
    """Reward of a command that has set none. text: the recipe's reward scores its output. exit: 1 for exit status 0,
    else 0."""
    distribution: Literal["run", "client"] = "run"
    """run: the recipe's temperature, top_p and so on apply, regardless of the program's requests. client: the program's
    settings apply; they must be the ones that the recipe trains with."""
    drain_patience_s: float = Field(default=PATIENCE_S, ge=0)
    """Seconds that a request waits while the schedule drains engines before a weight update. A request that would wait
    longer gets 503 with Retry-After; clients then retry, OpenAI's twice."""
    variables: dict[str, str] = Field(default_factory=dict)
    """Additional environment variables of a command. It inherits the run's environment, except names that look like
    secrets."""
    shown_tools: tuple[str | dict[str, JsonValue], ...] = ()
    """Tools in the program's requests, each a mapping in OpenAI's format, or its package.module:Name. Warm-up examples
    contain them, so that the model knows them when the program runs."""
    stdout_bytes: int = Field(default=1 << 20, ge=1)
    """Bytes kept of a command's output; the rest is read and dropped."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if bool(self.command) == bool(self.function):
            raise ValueError("set one of `command` and `function`")
        return self


class ProgramKind(EpisodeKind):
    """Kind of episodes that run programs, which get only an address and a key."""

    Config = ProgramConfig
    needs_chat = True
    config: ProgramConfig

    def check(self) -> None:
        if self.config.function:
            load_callable("function", self.config.function)
        self.tools()

    def tools(self) -> tuple[ToolSpec, ...]:
        """Returns the tools that the recipe declares for the program's requests."""
        return tuple(map(_read_tool, self.config.shown_tools))

    def create(self) -> Episode:
        return Program(self.config)


class Program:
    """Runs a program for each sample, with a server for the open sessions."""

    def __init__(self, config: ProgramConfig) -> None:
        self._config = config
        self._host = SessionHost()
        self._function = load_callable("function", config.function) if config.function else None

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Runs the program to its end. The reward comes from the reward route, else the program's result, else the
        recipe.
        """
        keeps = self._config.distribution == "run"
        patience_s = self._config.drain_patience_s
        serving = self._host.serve(session, keeps_distribution=keeps, patience_s=patience_s)
        async with serving as (conversation, endpoint):
            if self._function:
                outcome = await self._call_function(prompt, endpoint)
            else:
                outcome = await self._execute_command(prompt, endpoint, session.seed)
        return _read_reward(outcome, conversation)

    async def _call_function(self, prompt: Prompt, endpoint: SessionAddress) -> Outcome:
        assert self._function is not None
        call = functools.partial(self._function, row_of(prompt), endpoint.base_url, endpoint.api_key)
        if inspect.iscoroutinefunction(self._function):
            returned = await cast(Awaitable[object], call())
        else:
            returned = await on_thread(call)
        if returned is None or isinstance(returned, Outcome):
            return returned or Outcome()
        if isinstance(returned, str):
            return Outcome(text=returned)
        if isinstance(returned, bool | int | float):
            return Outcome(reward=float(returned))
        kind = type(returned).__name__
        raise TypeError(f"the program returned a {kind}; it returns its reward, its text, an Outcome or None")

    async def _execute_command(self, prompt: Prompt, endpoint: SessionAddress, seed: int) -> Outcome:
        row = row_of(prompt)
        inherited = {name: value for name, value in os.environ.items() if not _SECRET.search(name)}
        process = await asyncio.create_subprocess_exec(
            *end_command_with_parent(_make_arguments(self._config.command, row)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={**inherited, **endpoint.environment, "INTERLACE_SEED": str(seed), **self._config.variables},
            start_new_session=True,
        )
        output, errors = bytearray(), bytearray()
        talk = asyncio.gather(
            _read_stream(process.stdout, output, self._config.stdout_bytes),
            _read_stream(process.stderr, errors, self._config.stdout_bytes),
            _write_stream(process.stdin, json.dumps(row).encode()),
        )
        try:
            program_groups().add(process.pid)  # a group has the number of its first process
            await _wait_for_exit(process)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # remaining child processes may keep its output open
            program_groups().remove(process.pid)
            await _end_streams(process, talk)
            status = await process.wait()
        return self._make_outcome(status, output.decode(errors="replace"), errors.decode(errors="replace"))

    def _make_outcome(self, status: int, output: str, errors: str) -> Outcome:
        if is_start_failure(status, errors):
            raise InterlaceError(f"the program cannot be started: {errors.strip()[-_ERROR_CHARACTERS:]}")
        text = output.strip() or None
        if self._config.result == "exit":
            return Outcome(reward=float(status == 0), text=text)
        if status:
            how = f"exit status {status}" if status > 0 else signal.Signals(-status).name
            raise InterlaceError(f"the program ended with {how}: {errors.strip()[-_ERROR_CHARACTERS:]}")
        return Outcome(text=text)


def row_of(prompt: Prompt) -> dict[str, JSON]:
    """Returns a row in the program's format: the columns, the question's text and messages.

    It is a copy: other samples have the same row, and a function of the user may change its argument.
    """
    messages: list[JSON] = [to_mapping(message) for message in prompt.messages]
    return {**copy_json(prompt.metadata), "uid": prompt.uid, "prompt": question_of(prompt), "messages": messages}


def question_of(prompt: Prompt) -> str:
    """Returns the text of a prompt's last message; the prompt's text if it has no messages."""
    return prompt.messages[-1].content if prompt.messages else prompt.text


def _read_tool(given: str | dict[str, JsonValue]) -> ToolSpec:
    found = load_object("tool", given) if isinstance(given, str) else given
    if not isinstance(found, Mapping):
        raise UserError(f"tool {given!r} is a {type(found).__name__}, no mapping in OpenAI's form.")
    return as_tool(found)


def _read_reward(outcome: Outcome, conversation: Conversation) -> Outcome:
    if conversation.reward is None:
        return outcome
    return replace(outcome, reward=conversation.reward)


def _make_arguments(command: tuple[str, ...], row: Mapping[str, JSON]) -> list[str]:
    def value(found: "re.Match[str]") -> str:
        return str(row[found[1]]) if found[1] in row else found[0]

    arguments = [re.sub(r"\{(\w+)\}", value, argument) for argument in command]
    return [sys.executable, *arguments[1:]] if arguments[0] == "python" else arguments


async def _read_stream(stream: "asyncio.StreamReader | None", kept: bytearray, most: int) -> None:
    """Reads a stream to its end, and keeps its first `most` bytes."""
    assert stream is not None
    while part := await stream.read(1 << 16):
        kept += part[: max(0, most - len(kept))]


async def _end_streams(process: "asyncio.subprocess.Process", talk: "asyncio.Future[tuple[None, None, None]]") -> None:
    """Reads the rest of the output of a process that has ended, and closes its streams.

    A process in another group, such as a daemon that the program started, may hold the output open for ever.
    """
    try:
        await asyncio.wait({talk}, timeout=REST_WITHIN_S)
    finally:
        talk.cancel()
        assert process.stdin is not None
        if process.stdin.transport.get_write_buffer_size():
            process.stdin.transport.abort()  # close() would keep the pipe until the daemon reads the rest of the row
        # wait() waits for these. A close of the whole process could take its exit status from asyncio.
        pipes = [process._transport.get_pipe_transport(handle) for handle in range(3)]  # type: ignore[attr-defined]
        for pipe in pipes:
            pipe.close()
        await asyncio.wait({talk})  # unlike `await talk`, raises CancelledError only if the episode is cancelled
    with contextlib.suppress(asyncio.CancelledError):
        talk.result()


async def _write_stream(stream: "asyncio.StreamWriter | None", content: bytes) -> None:
    assert stream is not None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a program need not read its row
        stream.write(content)
        await stream.drain()
        stream.close()
        await stream.wait_closed()


async def _wait_for_exit(process: "asyncio.subprocess.Process") -> None:
    """Waits for the end of the process only; wait() would also wait for other processes that hold its output."""
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:  # the process has already ended
        return
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    loop.add_reader(handle, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(handle)
        os.close(handle)
