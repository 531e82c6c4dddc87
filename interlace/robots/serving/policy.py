"""Policies of the server: an observation in, a chunk of actions out.

K = actions of a chunk, A = numbers of an action.
"""

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import numpy as np

from interlace.core.guide import Guide
from interlace.core.types import FloatArray, Inputs, IntArray, Request, Response, SampleKey, SamplingParams
from interlace.models.action_tokens import ActionTokens
from interlace.models.inputs import IMAGE
from interlace.robots.episodes.robot import RobotConfig, RobotEpisode, check_spaces
from interlace.robots.serving.prefix import PrefixRule, commit_prefix, make_guide
from interlace.robots.serving.schema import ANY, ActRequest, ArrayField, PolicySchema
from interlace.rollouts.envs.spec import ArraySpec, EnvSpec

FIRST_GROUP = -2
"""Group number of the first request; later numbers count down. Groups of a run have numbers above NO_GROUP."""
PICTURE_UNITS = "RGB, 0 to 255"


class ServedPolicy(Protocol):
    """Policy of a server. Robots call it concurrently."""

    schema: PolicySchema
    """Inputs and outputs."""

    async def act(self, request: ActRequest) -> FloatArray:
        """Returns a chunk [K, A] in the robot's units, which begins with the committed actions of the request."""


def describe_turns(
    name: str,
    config: RobotConfig,
    spec: EnvSpec,
    actions: ActionTokens,
    *,
    instructions: Sequence[str],
    control_hz: float,
) -> PolicySchema:
    """Returns the schema of a run's policy. spec: of the run's simulators, whose arrays a robot sends.

    Raises UserError if the policy's actions or inputs do not fit the simulators.
    """
    check_spaces(config, spec, actions)
    units = f"as in {config.env.family}"
    ends, largest = np.stack([spec.action.low, spec.action.high]), np.finfo(np.float32).max
    # A number without a bound gets the largest one, because JSON has no infinity.
    low, high = np.clip(ends, -largest, largest).tolist() if np.isfinite(ends).any() else ((), ())
    return PolicySchema(
        policy=name,
        observation={
            array: _describe_array(array, spec.observation[array], actions, units) for array in actions.reads.shapes
        },
        actions=ArrayField(shape=(actions.chunk, spec.action.size), dtype="float32", units=units),
        low=tuple(low),
        high=tuple(high),
        num_choices=spec.action.num_choices,
        control_hz=control_hz,
        executed=actions.chunk,
        known_instructions=tuple(instructions),
        prefix_rule=_find_rule(actions),
    )


def _describe_array(name: str, spec: ArraySpec, actions: ActionTokens, units: str) -> ArrayField:
    is_picture, resizes = name.endswith(IMAGE), actions.reads.pictures
    shape = (ANY, ANY, 3) if is_picture and resizes is not None and resizes.takes_any_size else spec.shape
    return ArrayField(shape=shape, dtype=spec.dtype, units=PICTURE_UNITS if is_picture else units)


def _find_rule(actions: ActionTokens) -> PrefixRule:
    if actions.flow is not None:
        return "guided"
    return "overwritten" if actions.query_ids else "forced"


class TurnPolicy:
    """Policy of a run: each request is a turn of its episodes, with the same transformation of the observation."""

    def __init__(
        self,
        schema: PolicySchema,
        config: RobotConfig,
        actions: ActionTokens,
        params: SamplingParams,
        *,
        encode_prompt: Callable[[str], IntArray],
        ask: Callable[[Request], Awaitable[Response]],
    ) -> None:
        """params: temperature 0 for the most probable chunk. encode_prompt: returns the tokens of an instruction. ask:
        asks the engines.
        """
        self.schema = schema
        self._episode, self._actions, self._params = RobotEpisode(config), actions, params
        self._encode_prompt, self._ask = encode_prompt, ask
        self._numbers = itertools.count()

    async def act(self, request: ActRequest) -> FloatArray:
        """Returns a chunk; see ServedPolicy. Raises UserError if an engine refuses the request."""
        actions, delay = self._actions, request.delay
        context = actions.context(self._encode_prompt(request.prompt).tolist())
        forced: list[int] = []
        if delay and self.schema.prefix_rule == "forced":
            forced = actions.encode(request.prefix[:delay]).tolist()
        num_tokens = actions.num_tokens - len(forced)
        inputs = await self._prepare(request)
        noise = secrets.token_hex(8) if request.seed is None else f"seed {request.seed}"
        response = await self._ask(
            Request(
                uid=f"serve/{noise}",
                owner=SampleKey(FIRST_GROUP - next(self._numbers), 0),
                prompt_ids=np.asarray([*context, *forced], np.int32),
                params=self._params.model_copy(update={"max_new_tokens": num_tokens, "stop_token_ids": ()}),
                inputs=inputs,
                query_ids=actions.query_ids,
                guide=self._make_guide(request),
            )
        )
        chunk = actions.decode_answer(np.asarray([*forced, *response.token_ids], np.int32))
        return commit_prefix(chunk, request.prefix, delay)

    async def _prepare(self, request: ActRequest) -> Inputs:
        """Converts an observation as an episode does; pictures of published policies on a thread, as it takes long."""
        if self._actions.reads.pictures is None:
            return self._episode.inputs(request.observation, self._actions)
        return await asyncio.to_thread(self._episode.inputs, request.observation, self._actions)

    def _make_guide(self, request: ActRequest) -> Guide | None:
        flow = self._actions.flow
        if flow is None or not len(request.prefix):
            return None
        return make_guide(self._actions.scale(request.prefix), request.delay, (flow.chunk, flow.padded_size))
