"""Episode with an environment of messages: a class with reset and step, or a package of `verifiers`.

The package is `verifiers` 0.4 (its v1 interface): a taskset, its agents, and a harness per agent. The harness is a
program of the package that sends requests to the session's address. `uv`, which must be on the PATH, starts most
harnesses, including the default one.
"""

import importlib
import importlib.util
import inspect
import itertools
import math
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from statistics import fmean
from typing import Any, Self

import numpy as np
from pydantic import Field, JsonValue, ValidationError, model_validator

from interlace.agents.server.app import SessionAddress
from interlace.agents.server.host import SessionHost
from interlace.agents.tools.function import on_thread
from interlace.core.errors import ContextFullError, UserError
from interlace.core.json_values import copy_json
from interlace.core.messages import Message, ToolSpec, as_message, as_tool, to_mapping
from interlace.core.plugins import load_object
from interlace.core.types import BoolArray, FinishReason, Prompt
from interlace.rewards.config import TAKEN
from interlace.rollouts.base import Episode, Outcome, Session, Turn
from interlace.rollouts.config import EpisodeConfig, EpisodeKind


class EnvironmentConfig(EpisodeConfig):
    """Settings of `environment`: your own class, or a package of `verifiers`."""

    environment: str | None = None
    """Your class as package.module:Class; each episode gets a separate object. `reset(row)` returns the first messages,
    or None for the prompt's. `step(message)` takes the model's message and returns (new messages, reward of the turn,
    whether the episode is over). Both may be async. An attribute `tools` is shown to the model. After `max_turns` turns
    the episode ends with the rewards so far."""
    verifiers: str | None = None
    """Name of an installed environment package of `verifiers`. It runs unchanged, through the session server."""
    options: dict[str, JsonValue] = Field(default_factory=dict)
    """Arguments of the class or of the package: arguments of load_environment (0.3), or fields of the environment's
    configuration, such as `taskset` and `agent` (0.4)."""

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.environment is None) == (self.verifiers is None):
            raise ValueError("set one of `environment` and `verifiers`")
        return self


class EnvironmentKind(EpisodeKind):
    """Kind of episodes with an environment of messages."""

    Config = EnvironmentConfig
    needs_chat = True
    config: EnvironmentConfig

    def check(self) -> None:
        self.create()

    def tools(self) -> tuple[ToolSpec, ...]:
        """Returns the tools of your class; none if `tools` is a property of its objects."""
        spec = self.config.environment
        found = getattr(load_object("environment", spec), "tools", ()) if spec else ()
        return tuple(as_tool(tool) for tool in found) if isinstance(found, Sequence) else ()

    def create(self) -> Episode:
        if self.config.environment:
            return EnvironmentEpisode(self.config.environment, self.config.options, self.config.max_turns)
        return create_verifiers_episode(self.config)


def create_verifiers_episode(config: EnvironmentConfig) -> Episode:
    """Creates the episode for the installed version of `verifiers`. Raises UserError if the version has neither
    interface.
    """
    try:
        verifiers = importlib.import_module("verifiers")
    except ImportError:
        raise UserError("environment packages need `verifiers`: pip install verifiers.") from None
    if hasattr(verifiers, "load_environment"):  # 0.3
        return VerifiersEpisode(config)
    if importlib.util.find_spec("verifiers.v1"):
        return VerifiersTaskEpisode(str(config.verifiers), config.options)
    version = getattr(verifiers, "__version__", "of an unknown version")
    raise UserError(
        f"verifiers {version} is installed, and interlace runs environments of versions 0.3 and 0.4: "
        "pip install verifiers==0.4.0."
    )


class EnvironmentEpisode:
    """Alternates between the model and an object of the class. The reward is the sum of the turns' rewards.

    After `max_turns` turns, or if the context has no room for a further turn, the episode ends with the rewards so far:
    a sample that failed instead would not be trained on, and the others would seem to be all.
    """

    def __init__(self, spec: str, options: Mapping[str, JsonValue], max_turns: int) -> None:
        found = load_object("environment", spec)
        if not inspect.isclass(found):
            raise UserError(f"environment {spec!r} is a {type(found).__name__}, not a class with `reset` and `step`.")
        if missing := [name for name in ("reset", "step") if not callable(getattr(found, name, None))]:
            raise UserError(f"environment {spec!r} has no method `{missing[0]}`.")
        self._make: Callable[[], Any] = lambda: found(**options)
        self._max_turns = max_turns

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        environment = self._make()
        tools = [as_tool(tool) for tool in getattr(environment, "tools", ())]
        row = {**copy_json(prompt.metadata), "uid": prompt.uid, "answer": prompt.answer}
        async with session.waiting("the environment's reset"):
            begun = await _call_method(environment.reset, row)
        messages = list(prompt.messages) if begun is None else _read_messages(begun, "reset")
        text = ""
        for number in range(self._max_turns):
            try:
                turn = await session.generate(messages, tools=tools)
            except ContextFullError:
                if number == 0:
                    raise
                return Outcome(reward=0.0, text=text, finish_reason=FinishReason.LENGTH)
            text = turn.message.content
            async with session.waiting("the environment's step"):
                said, reward, over = _read_step(await _call_method(environment.step, turn.message))
            if reward:
                session.reward(turn, reward)
            if over:
                break
            messages += [turn.message, *said]
        # The rewards of the turns are added to this.
        return Outcome(reward=0.0, text=text)


async def _call_method(method: Callable[..., Any], argument: object) -> object:
    """Calls a method; a sync method runs on a separate thread."""
    if inspect.iscoroutinefunction(method):
        return await method(argument)
    return await on_thread(partial(method, argument))


def _read_step(returned: object) -> tuple[list[Message], float, bool]:
    if not isinstance(returned, tuple) or len(returned) != 3:
        raise TypeError("step() returns (new messages, reward, whether the episode is over)")
    said, reward, over = returned
    messages = _read_messages(said or (), "step")
    if not over and not messages:
        raise ValueError("step() returned no new message for the model, but the episode is not over")
    return messages, float(reward), bool(over)


def _read_messages(given: object, method: str) -> list[Message]:
    if isinstance(given, str | Mapping | Message) or not isinstance(given, Sequence):
        raise TypeError(f"{method}() must return a list of messages, not a {type(given).__name__}")
    return [as_message(each, f"message {place} of {method}()") for place, each in enumerate(given)]


class VerifiersEpisode:
    """Runs rollouts of an environment of `verifiers` 0.3, whose client sends requests to the session's address."""

    def __init__(self, config: EnvironmentConfig) -> None:
        import verifiers

        try:
            self._environment = verifiers.load_environment(config.verifiers, **config.options)
        except Exception as error:
            raise UserError(f"verifiers has no environment {config.verifiers!r} to load: {error}") from error
        self._host = SessionHost()

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Runs one rollout and scores it by the environment's rubric."""
        from openai import AsyncOpenAI
        from verifiers.clients import OpenAIChatCompletionsClient

        async with self._host.serve(session) as (conversation, address):
            theirs = AsyncOpenAI(base_url=address.base_url, api_key=address.api_key)
            try:
                state = await self._environment.run_rollout(
                    input=_rollout_input(prompt),
                    client=OpenAIChatCompletionsClient(theirs),
                    model="policy",
                    sampling_args={},
                )
            finally:
                await theirs.close()
            if is_fault(state.get("error"), conversation.num_turns):
                raise RuntimeError(f"the environment's rollout failed: {state['error']}")
        return Outcome(reward=float(state["reward"]), parts=select_numbers(state.get("metrics") or {}))


OF_POLICY = (
    "ModelError", "InvalidModelResponseError", "EmptyModelResponseError", "ToolError", "ToolParseError", "ToolCallError"
)  # fmt: skip
"""Errors of `verifiers` 0.3 by which a rollout ends that the policy may have caused, such as a full context."""


def is_fault(error: Mapping[str, JsonValue] | None, num_turns: int) -> bool:
    """Returns whether a rollout of `verifiers` 0.3 has no reward of the policy: it failed before a turn, or its
    environment failed, such as a sandbox.
    """
    return error is not None and (num_turns == 0 or error.get("error") not in OF_POLICY)


def _rollout_input(prompt: Prompt) -> dict[str, Any]:
    """Returns a row in the format of an environment of `verifiers`."""
    metadata: dict[str, Any] = copy_json(prompt.metadata)
    info = metadata.get("info", {})
    return {
        "prompt": [to_mapping(message) for message in prompt.messages],
        "example_id": metadata.get("example_id", 0),
        "answer": prompt.answer,
        "info": info if isinstance(info, dict) else {},
    }


INDEX = "idx"
"""Column of a row that contains the position of a task in the taskset."""
HARNESS = "null"
"""Harness without tools, for tasksets that define none: the default harness would run code on this machine."""


class VerifiersTaskEpisode:
    """Runs episodes of a taskset of `verifiers`, scored by the tasks' rewards.

    A row names a task by `idx`, or its columns are the fields of the task's data: `prompt` and any others.
    """

    def __init__(self, taskset: str, options: Mapping[str, JsonValue]) -> None:
        """options: fields of the environment's configuration, such as `taskset`, `agent` or `timeout`."""
        self._taskset = taskset
        self._v1 = importlib.import_module("verifiers.v1")
        self._loaders = importlib.import_module("verifiers.v1.utils.loaders")
        try:
            self._config = self._read_config(options)
            self._environment()
        except Exception as error:
            raise UserError(f"verifiers {_read_version()} has no environment {taskset!r} to load: {error}") from error
        if shutil.which("uv") is None:
            raise UserError(f"an environment of verifiers {_read_version()} starts its programs by uv: pip install uv.")
        self._host = SessionHost()

    def _read_config(self, options: Mapping[str, JsonValue]) -> Any:
        data: dict[str, Any] = {**options}
        data["taskset"] = {**(data.get("taskset") or {}), "id": self._taskset}
        kind = self._loaders.env_config_type(self._taskset, data.get("id", ""))
        if "agent" in kind.model_fields:
            own = {"runtime": {"type": "subprocess"}}
            if self._loaders.default_harness_id(self._taskset) == "bash":
                own["harness"] = {"id": HARNESS}
            data["agent"] = {**own, **(data.get("agent") or {})}
        return kind.model_validate(data)

    def _environment(self) -> Any:
        """Loads the environment: one object serves one episode at a time."""
        return self._loaders.load_environment(self._config)

    async def run(self, prompt: Prompt, session: Session) -> Outcome:
        """Runs one episode. The reward and each metric are means over the trained agents, and only turns of these are
        trained: not those of a simulated user, nor of an attempt that the package has repeated.
        """
        environment = self._environment()
        task = self._find_task(environment, prompt)
        async with self._host.serve(session) as (conversation, address):
            with _client_config(self._v1, address) as client:
                context = self._v1.ModelContext(model="policy", client=client)
                async with environment.serving():
                    episode = await environment.run_episode(task, context)
        if not environment.complete(episode):  # the rewards of such an episode may lack parts
            raise RuntimeError(f"the environment's episode failed: {_first_error(episode)}")
        trained = [trace for trace in episode.traces if _is_trained(trace, address)]
        traces = trained or list(episode.traces)
        rewards = [float(trace.reward) for trace in traces]
        parts = average_metrics([select_numbers(trace.metrics) for trace in traces])
        valid = exclude_turns(conversation.turns_by_agent, {trace.id for trace in traces})
        if len(valid) == conversation.num_turns:
            raise RuntimeError("the episode ended without a turn of an agent that is trained")
        return Outcome(reward=sum(rewards) / len(rewards), parts=parts, valid=valid)

    def _find_task(self, environment: Any, prompt: Prompt) -> Any:
        """Returns the task that a row names by its index, or a task made from the row's columns."""
        index = prompt.metadata.get(INDEX)
        if isinstance(index, int):
            found = next(itertools.islice(iter(environment.taskset), index, None), None)
            if found is None:
                raise UserError(f"row {prompt.uid}: {INDEX} = {index}, and {self._taskset!r} has no such task.")
            return found
        kind = type(environment.taskset).task_type()
        fields = kind.data_type().model_fields
        row = {**copy_json(prompt.metadata), "answer": prompt.answer}
        data = {name: value for name, value in row.items() if name in fields}
        try:
            made = kind.data_type().model_validate(
                {"prompt": [to_mapping(message) for message in prompt.messages], **data}
            )
        except ValidationError as error:
            raise UserError(
                f"row {prompt.uid} does not fit the tasks of {self._taskset!r}: {error}. Give its columns, or the "
                f"column {INDEX} with the position of a task."
            ) from error
        return kind(made, environment.taskset.config.task)


@contextmanager
def _client_config(v1: Any, address: SessionAddress) -> Iterator[Any]:
    """Yields the client settings for the session's address.

    The package reads the key from an environment variable, which exists during the episode.
    """
    variable = f"INTERLACE_SESSION_{secrets.token_hex(8).upper()}"
    os.environ[variable] = address.api_key
    try:
        yield v1.EvalClientConfig(base_url=address.base_url, api_key_var=variable)
    finally:
        del os.environ[variable]


def _is_trained(trace: Any, address: SessionAddress) -> bool:
    """Returns whether a run of an agent is of the policy: one that its environment trains, at the session's address."""
    agent = trace.agent
    return agent is None or (agent.trainable and getattr(agent.config.client, "base_url", None) == address.base_url)


def exclude_turns(turns: Mapping[str, Sequence[Turn]], trained: Collection[str]) -> dict[int, BoolArray]:
    """Returns a mask without a trained token for each turn of an agent that is not trained; see Outcome.valid.

    turns: by agent. Turns of requests that name no agent are trained.
    """
    return {
        turn.number: np.zeros(len(turn.token_ids), np.bool_)
        for agent, own in turns.items()
        if agent and agent not in trained
        for turn in own
    }


def select_numbers(metrics: Mapping[str, float | None]) -> dict[str, float]:
    """Returns the metrics of a package that have a value, as numbers.

    One whose name no part of a reward may have, such as `mean`, is named `metric_mean`: its user cannot rename it.
    """
    numbers = {
        f"metric_{name}" if name in TAKEN else name: float(value)
        for name, value in metrics.items()
        if value is not None
    }
    return {name: number for name, number in numbers.items() if math.isfinite(number)}


def average_metrics(metrics: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the mean of each metric over the agents that have it. metrics: of each agent."""
    names = dict.fromkeys(name for each in metrics for name in each)
    return {name: fmean(each[name] for each in metrics if name in each) for name in names}


def _first_error(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[0].type}: {errors[0].message}" if errors else "it gives no reason"


def _read_version() -> str:
    return str(importlib.import_module("verifiers").__version__)
