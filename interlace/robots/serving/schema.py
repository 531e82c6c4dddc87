"""Schema of a served policy, and the requests that fit it. K = actions of a chunk, A = numbers of an action."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from pydantic import Field

from interlace.core.config import Config
from interlace.core.errors import UserError, nearest
from interlace.core.types import BoolArray, FloatArray
from interlace.robots.serving.limits import SafetyLimits
from interlace.robots.serving.prefix import PrefixRule
from interlace.robots.serving.wire import Message, RequestError
from interlace.rollouts.envs.spec import Array, EnvSpec, Observation

MAX_MESSAGE_BYTES = 16 << 20
"""Largest message by default: two pictures of 1080 x 1920 pixels and a state have 12.5 MB."""
ANY = -1
"""Size of an axis that may have any length."""
KIND, PROMPT, PREFIX, DELAY, SEED, LAST = "kind", "prompt", "prefix", "delay", "seed", "last_action"
"""Keys of a request besides the arrays of an observation."""
CONTINUES = "continues"
"""Key of an intervention that the next request continues."""
ACT, INTERVENTION = "act", "intervention"
"""Kinds of requests."""
LONGEST_PROMPT = 4000
"""Characters of an instruction."""
LARGEST_SEED = 2**63 - 1


class ArrayField(Config):
    """One array."""

    shape: tuple[int, ...]
    """Sizes; -1 for any size."""
    dtype: str
    """Name of the numpy type: `float32`, `uint8`."""
    units: str = ""


class PolicySchema(Config):
    """Inputs and outputs of a served policy. The server sends it first, and shows it at /schema."""

    policy: str
    """Name of the policy."""
    observation: dict[str, ArrayField]
    """Arrays of a request, by name. Pictures are upright."""
    actions: ArrayField
    """Array `actions` of an answer, [K, A]."""
    low: tuple[float, ...] = ()
    """[A] smallest values of an action; empty without a bound."""
    high: tuple[float, ...] = ()
    """[A] largest values."""
    num_choices: int | None = None
    """Number of choices, if an action is one whole number from 0; None for continuous actions."""
    control_hz: float = Field(gt=0)
    """Actions per second for which the policy is meant."""
    executed: int = Field(ge=1)
    """Number of actions of a chunk that stop-and-wait executes before the next request."""
    known_instructions: tuple[str, ...] = ()
    """Instructions that the policy was trained on. A request may have another one as `prompt`."""
    prefix_rule: PrefixRule
    """Effect of a request's `prefix`; see interlace/robots/serving/prefix.py."""
    applied_limits: SafetyLimits | None = None
    """Limits that the server applies; None for the bounds of the actions alone."""
    records_interventions: bool = False
    """True if the server takes requests of kind `intervention`."""
    max_message_bytes: int = MAX_MESSAGE_BYTES

    @property
    def chunk(self) -> int:
        """Number of actions of a chunk, K."""
        return self.actions.shape[0]

    @property
    def size(self) -> int:
        """Numbers of an action, A."""
        return self.actions.shape[1]

    def check_robot(self, spec: EnvSpec) -> None:
        """Raises UserError if a robot's arrays or actions do not fit the policy."""
        if spec.action.size != self.size or spec.action.num_choices != self.num_choices:
            has, takes = self.num_choices or "no", spec.action.num_choices or "no"
            raise UserError(
                f"the policy {self.policy!r} gives actions of {self.size} numbers ({has} choices), and the robot takes "
                f"{spec.action.size} ({takes} choices). Serve a policy of this robot."
            )
        shapes = {name: list(array.shape) for name, array in spec.observation.items()}
        for name, field in self.observation.items():
            if name not in shapes or not _fits(tuple(shapes[name]), field.shape):
                raise UserError(
                    f"the policy {self.policy!r} reads {name} of shape {list(field.shape)}, and the robot gives "
                    f"{shapes}. Serve a policy of this robot."
                )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ActRequest:
    """Request of a chunk of actions."""

    observation: Observation
    """One observation, without a batch axis."""
    prompt: str
    """Instruction."""
    prefix: FloatArray
    """[n, A] actions of the current chunk that are not executed yet; n is 0 without real-time chunking."""
    delay: int = 0
    """Number of actions of the prefix that are executed before the answer arrives; less than K."""
    seed: int | None = None
    """Seed of sampled chunks; None draws one."""
    last_action: FloatArray | None = None
    """[A] action before the chunk, for the limit of changes; None if it is not known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Intervention:
    """Actions of a human over T ticks."""

    observations: Observation
    """[T, ...] before each action."""
    actions: FloatArray
    """[T, A]."""
    prompt: str
    rewards: FloatArray | None = None
    """[T] rewards; None if they are unknown."""
    terminated: BoolArray | None = None
    """[T] True at the action with which the task ended; None if it is unknown."""
    success: bool | None = None
    """True if the task was solved; None if it is unknown."""
    continues: bool = False
    """True if the next intervention of the same connection continues this one."""

    def cut(self, begin: int, end: int) -> "Intervention":
        """Returns the part of some ticks; join_parts() is the inverse."""
        part = slice(begin, end)
        return replace(
            self,
            observations={name: array[part] for name, array in self.observations.items()},
            actions=self.actions[part],
            rewards=None if self.rewards is None else self.rewards[part],
            terminated=None if self.terminated is None else self.terminated[part],
            continues=self.continues or end < len(self.actions),
        )


def join_parts(parts: Sequence[Intervention]) -> Intervention:
    """Joins the parts of an intervention. Its success is the last part's.

    Raises RequestError if the parts have several prompts, or only some of them have rewards or ends.
    """
    last = parts[-1]
    rewards = [part.rewards for part in parts if part.rewards is not None]
    ends = [part.terminated for part in parts if part.terminated is not None]
    if {len(rewards), len(ends)} - {0, len(parts)} or any(part.prompt != last.prompt for part in parts):
        raise RequestError(
            f"the {len(parts)} parts of an intervention differ in their prompt, or only some of them have rewards or "
            "terminated. Send all parts alike."
        )
    return replace(
        last,
        observations={name: np.concatenate([part.observations[name] for part in parts]) for name in last.observations},
        actions=np.concatenate([part.actions for part in parts]),
        rewards=np.concatenate(rewards) if rewards else None,
        terminated=np.concatenate(ends) if ends else None,
    )


def read_kind(message: Message) -> Literal["act", "intervention"]:
    """Returns the kind of a request. Raises RequestError for an unknown one."""
    found = message.get(KIND, ACT)
    if isinstance(found, str) and found == ACT:
        return "act"
    if isinstance(found, str) and found == INTERVENTION:
        return "intervention"
    raise RequestError(f"the request has kind {found!r}: known are {ACT} and {INTERVENTION}.")


def read_act(message: Message, schema: PolicySchema) -> ActRequest:
    """Reads a request of a chunk. Raises RequestError for a request that does not fit the schema."""
    _check_keys(message, (*schema.observation, KIND, PROMPT, PREFIX, DELAY, SEED, LAST))
    prefix = message.get(PREFIX)
    found = np.zeros((0, schema.size), np.float32)
    if prefix is not None:
        found = _read_floats(PREFIX, prefix, (ANY, schema.size))
    if schema.chunk == 1 and (len(found) or _read_whole(DELAY, message.get(DELAY, 0), most=LARGEST_SEED)):
        raise RequestError(
            "the request has a prefix or a delay, and the policy gives one action per request, after which no action "
            "is left for real-time chunking. Send neither, and wait for each action (stop-and-wait)."
        )
    if len(found) > schema.chunk:
        raise RequestError(f"prefix has {len(found)} actions, and a chunk of the policy {schema.chunk}.")
    delay = _read_whole(DELAY, message.get(DELAY, 0), most=schema.chunk - 1)
    if delay > len(found):
        raise RequestError(f"delay={delay} actions are committed, and prefix has {len(found)}. Send them as prefix.")
    seed, last = message.get(SEED), message.get(LAST)
    return ActRequest(
        observation={name: _read_array(name, message, field) for name, field in schema.observation.items()},
        prompt=_read_prompt(message, schema),
        prefix=found,
        delay=delay,
        seed=None if seed is None else _read_whole(SEED, seed, most=LARGEST_SEED),
        last_action=None if last is None else _read_floats(LAST, last, (schema.size,)),
    )


def read_intervention(message: Message, schema: PolicySchema) -> Intervention:
    """Reads the actions of a human. Raises RequestError as read_act() does."""
    _check_keys(message, (*schema.observation, KIND, PROMPT, CONTINUES, "actions", "rewards", "terminated", "success"))
    actions = _read_floats("actions", message.get("actions"), (ANY, schema.size))
    count = len(actions)
    if not count:
        raise RequestError("actions of the intervention are empty.")
    arrays = {
        name: _read_array(name, message, field.model_copy(update={"shape": (count, *field.shape)}))
        for name, field in schema.observation.items()
    }
    names = ("rewards", "terminated", "success", CONTINUES)
    rewards, ended, success, continues = (message.get(name) for name in names)
    for name, value in (("terminated", ended), ("success", success), (CONTINUES, continues)):
        if not (value is None or isinstance(value, bool)):
            raise RequestError(f"{name} is {type(value).__name__}: send true or false.")
    is_last = np.arange(count) == count - 1
    return Intervention(
        observations=arrays,
        actions=actions,
        prompt=_read_prompt(message, schema),
        rewards=None if rewards is None else _read_floats("rewards", rewards, (count,)),
        terminated=None if ended is None else is_last & bool(ended),
        success=None if success is None else bool(success),
        continues=bool(continues),
    )


def _check_keys(message: Message, known: tuple[str, ...]) -> None:
    if unknown := [name for name in message if name not in known]:
        raise RequestError(f"the request has the unknown key {unknown[0]!r}.{nearest(unknown[0], known)}")


def _read_array(name: str, message: Message, field: ArrayField) -> Array:
    given = message.get(name)
    if given is None:
        what = "camera" if field.dtype == "uint8" else "array"
        raise RequestError(f"the policy reads the {what} {name!r}, and the request has {sorted(message)}.")
    if not isinstance(given, np.ndarray):
        raise RequestError(f"{name} is {type(given).__name__}: send an array of {field.dtype}.")
    wanted = np.dtype(field.dtype)
    if given.dtype.kind != wanted.kind or (wanted.kind != "f" and given.dtype != wanted):
        raise RequestError(f"{name} has the type {given.dtype}, and the policy reads {field.dtype}.")
    return _convert_array(name, given, field.shape, wanted)


def _read_floats(name: str, given: object, shape: tuple[int, ...]) -> FloatArray:
    if not isinstance(given, np.ndarray) or given.dtype.kind not in "fiu":
        found = given.dtype if isinstance(given, np.ndarray) else type(given).__name__
        raise RequestError(f"{name} is {found}: send an array of float32 of shape {list(shape)}.")
    return _convert_array(name, given, shape, np.dtype(np.float32)).astype(np.float32, copy=False)


def _convert_array(name: str, given: Array, shape: tuple[int, ...], wanted: np.dtype[np.generic]) -> Array:
    """Converts an array. Raises RequestError if it has another shape, or a number that is not finite in the new type.

    The largest float64 numbers are infinite as float32.
    """
    if not _fits(given.shape, shape) or (0 in given.shape and name not in (PREFIX, "actions")):
        raise RequestError(f"{name} has shape {list(given.shape)}, and the policy reads {list(shape)}.")
    with np.errstate(over="ignore"):
        found = given.astype(wanted)
    if wanted.kind == "f" and not np.isfinite(found).all():
        place = tuple(int(index) for index in np.argwhere(~np.isfinite(found))[0])
        raise RequestError(f"{name}{list(place)} is {given[place]}: numbers must be finite in {wanted}.")
    return found


def _fits(given: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    return len(given) == len(wanted) and all(want in (ANY, have) for have, want in zip(given, wanted, strict=True))


def _read_prompt(message: Message, schema: PolicySchema) -> str:
    given = message.get(PROMPT)
    if given is None and len(schema.known_instructions) == 1:
        return schema.known_instructions[0]
    if given is None:
        known = f": {', '.join(map(repr, schema.known_instructions))}" if schema.known_instructions else ""
        raise RequestError(f"the request has no prompt, and the policy knows several instructions{known}.")
    if not isinstance(given, str) or not given.strip() or len(given) > LONGEST_PROMPT:
        raise RequestError(f"prompt must be a text of 1 to {LONGEST_PROMPT} characters.")
    return given


def _read_whole(name: str, given: object, *, most: int) -> int:
    if isinstance(given, np.ndarray) and given.dtype.kind in "iu" and not given.shape:
        given = int(given)
    if isinstance(given, np.integer):
        given = int(given)
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given <= most:
        raise RequestError(f"{name} is {given!r}: it must be a whole number from 0 to {most}.")
    return given
