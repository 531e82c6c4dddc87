"""Episodes with environments of `verifiers` 0.4 (its v1 interface): a taskset, its agents, and a harness per agent.

The harness is a program of the package that sends requests to the session's address. `uv`, which must be on the PATH,
starts most harnesses, including the default one.
"""

import importlib
import itertools
import math
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pydantic import JsonValue, ValidationError

from interlace.agents.server.app import SessionAddress
from interlace.agents.server.host import SessionHost
from interlace.core.errors import UserError
from interlace.core.json_values import copy_json
from interlace.core.messages import to_mapping
from interlace.core.types import Prompt
from interlace.rewards.config import TAKEN
from interlace.rollouts.base import Outcome, Session

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
        """Runs one episode. The reward is the mean over the trained agents."""
        environment = self._environment()
        task = self._find_task(environment, prompt)
        async with self._host.serve(session) as (conversation, address):
            with _client_config(self._v1, address) as client:
                context = self._v1.ModelContext(model="policy", client=client)
                async with environment.serving():
                    episode = await environment.run_episode(task, context)
            trained = [trace for trace in episode.traces if trace.agent is None or trace.agent.trainable]
            traces = trained or list(episode.traces)
            if not episode.ok and (conversation.num_turns == 0 or not any(trace.rewards for trace in traces)):
                raise RuntimeError(f"the environment's episode failed: {_first_error(episode)}")
        rewards = [float(trace.reward) for trace in traces]
        parts = {name: value for trace in traces for name, value in select_numbers(trace.metrics).items()}
        return Outcome(reward=sum(rewards) / len(rewards), parts=parts)

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


def _first_error(episode: Any) -> str:
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return f"{errors[0].type}: {errors[0].message}" if errors else "it gives no reason"


def _read_version() -> str:
    return str(importlib.import_module("verifiers").__version__)
