"""Control loop of a robot: it executes one action at each tick, and requests chunks from the policy server.

`stop-and-wait` executes the first actions of a chunk, then requests the next one and waits. `rtc` (real-time chunking,
arXiv 2506.07339) requests the next chunk while it executes the current one, and sends the rest of the current one.
"""

import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, get_args

import numpy as np

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.envs.base import stack_observations
from interlace.robots.serving.client import ActionChunk, PolicyClient
from interlace.robots.serving.limits import ActionLimiter, LimitCounts, SafetyLimits
from interlace.robots.serving.schema import Intervention, PolicySchema
from interlace.rollouts.envs.spec import Observation

Mode: TypeAlias = Literal["rtc", "stop-and-wait"]
KEPT_DELAYS = 8
"""Number of past delays of which the largest is the expected one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tick:
    """Result of one action."""

    ended: bool = False
    """True if the episode is over."""
    terminated: bool = False
    """True if the task ended the episode, not a time limit."""
    reward: float | None = None
    """Reward; None if the robot measures none."""
    success: bool | None = None
    """True if the task is solved; None if the robot does not measure it."""


class Robot(Protocol):
    """Robot or simulator."""

    def observe(self) -> Observation:
        """Returns the current arrays, without a batch axis."""

    def act(self, action: FloatArray) -> Tick:
        """Executes one action, [A]."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ControlSettings:
    """Settings of a control loop."""

    mode: Mode | None = None
    """None: `rtc` if the policy gives several actions per request, else `stop-and-wait`."""
    control_hz: float | None = None
    """Ticks per second; None for the policy's."""
    executed: int | None = None
    """Actions between two requests, at least. None: half of a chunk for `rtc`, the policy's number for `stop-and-wait`.
    """
    limits: SafetyLimits = field(default_factory=SafetyLimits)
    """Limits of the executed actions."""
    prompt: str | None = None
    """Instruction; None if the policy knows only one."""


@dataclass(slots=True, kw_only=True, eq=False)
class ControlReport:
    """Counts of one episode."""

    ticks: int = 0
    idle_ticks: int = 0
    """Ticks without an action of a chunk or of a human; the robot executes the safe action, if there is one."""
    human_ticks: int = 0
    late_ticks: int = 0
    """Ticks that began later than a tick after their time, because the loop was too slow."""
    chunks: int = 0
    interventions: int = 0
    returned: float = 0.0
    """Sum of the rewards."""
    success: bool = False
    limited: LimitCounts = field(default_factory=LimitCounts)
    latencies_s: list[float] = field(default_factory=list)
    """Seconds from each request to its answer."""
    server_s: list[float] = field(default_factory=list)
    """Seconds of each request in the server."""


@dataclass(frozen=True, slots=True, eq=False)
class _Current:
    actions: FloatArray
    start: int
    """Tick of the chunk's first action."""


class ControlLoop:
    """Runs episodes of one robot with the chunks of a server."""

    def __init__(
        self,
        client: PolicyClient,
        robot: Robot,
        settings: ControlSettings,
        *,
        human: Callable[[Observation], FloatArray | None] | None = None,
    ) -> None:
        """human: returns a human's action, or None while the policy acts; called at each tick. Raises UserError for
        settings that do not fit the policy.
        """
        schema = client.schema
        _check_settings(settings, schema)
        self._client, self._robot, self._settings, self._human = client, robot, settings, human
        self._mode: Mode = settings.mode or ("rtc" if schema.chunk > 1 else "stop-and-wait")
        self._tick_s = 1 / (settings.control_hz or schema.control_hz)
        half = math.ceil(schema.chunk / 2)
        self._executed = settings.executed or (half if self._mode == "rtc" else schema.executed)
        if self._executed > schema.chunk:
            raise UserError(f"executed={self._executed} actions, and a chunk of the policy has {schema.chunk}.")
        self._limiter = ActionLimiter(settings.limits, schema.size)
        self._current: _Current | None = None
        self._pending: Future[ActionChunk] | None = None
        self._start = 0
        """Tick of the first action of the pending chunk: of its request, plus the idle ticks since."""
        self._asked_at = 0
        """Tick of the pending request."""
        self._delays: deque[int] = deque([1], maxlen=KEPT_DELAYS)
        """Delays of the last chunks, in ticks."""
        chunk_s = schema.chunk * self._tick_s
        self._watchdog_s, self._last_chunk_s = settings.limits.watchdog_s or chunk_s + 1, 0.0
        self._shown: list[tuple[Observation, FloatArray]] = []
        """Observations and actions of the current intervention."""
        self._ticks: list[Tick] = []
        """Results of these actions."""
        self._interventions: list[Intervention] = []
        """Interventions of the episode."""
        if human and settings.prompt is None and len(schema.known_instructions) != 1:
            raise UserError(
                "interventions are recorded with an instruction, and the policy knows "
                f"{list(schema.known_instructions)}. Set prompt."
            )

    def run(self, max_ticks: int, *, start: FloatArray | None = None) -> ControlReport:
        """Runs until the robot's episode is over, at most `max_ticks`.

        start: [A] action at which the robot does not move, such as its joint positions. The first action is limited
        from it, and the safe action `hold` repeats it before the first one. If None, the first action may change by any
        amount, and with `hold` the robot gets no action before it. After an error the robot executes the safe action
        once; the error is then raised. Raises UserError if `start` is not an action.
        """
        self._limiter.counts, self._limiter.previous = LimitCounts(), self._read_start(start)
        report = ControlReport(limited=self._limiter.counts)
        due_s = self._last_chunk_s = time.perf_counter()
        self._current = None
        self._shown, self._ticks, self._interventions = [], [], []  # an episode with an error leaves its own
        try:
            for tick in range(max_ticks):
                time.sleep(max(0.0, due_s - time.perf_counter()))
                if (now_s := time.perf_counter()) > due_s + self._tick_s:
                    report.late_ticks += 1
                    due_s = now_s  # missed ticks are left out: actions in quick succession would be unsafe
                due_s += self._tick_s
                report.ticks += 1
                action = self._choose_action(tick, due_s, report)
                if action is None:
                    continue
                done = self._robot.act(action)
                report.returned += done.reward or 0.0
                report.success |= bool(done.success)
                if len(self._ticks) < len(self._shown):
                    self._ticks.append(done)
                if done.ended:
                    break
        except BaseException:
            if (safe := self._limiter.safe_action()) is not None:
                self._robot.act(safe)
            raise
        finally:
            self._pending = None
        self._end_intervention(report)
        if self._client.schema.records_interventions:  # not during the episode, whose requests would wait
            for given in self._interventions:
                self._client.record(given)
        return report

    def _read_start(self, start: FloatArray | None) -> FloatArray | None:
        if start is None:
            return None
        found, size = np.asarray(start, np.float32), self._client.schema.size
        if found.shape != (size,) or not np.isfinite(found).all():
            raise UserError(f"start = {found.tolist()}: it must be an action of {size} finite numbers.")
        return found

    def _choose_action(self, tick: int, end_s: float, report: ControlReport) -> FloatArray | None:
        """Returns the action of a tick; None if there is none to hold yet."""
        observation = self._robot.observe()
        taken = self._human(observation) if self._human else None
        if taken is not None:
            action = self._limiter.limit(taken)
            self._shown.append((observation, action))
            report.human_ticks += 1
            self._current = None  # the policy continues from the state that the human leaves
            self._pending = None
            return action
        self._end_intervention(report)
        found = self._take_action(tick, observation, end_s, report)
        is_late = time.perf_counter() - self._last_chunk_s > self._watchdog_s
        if found is None or is_late:
            report.idle_ticks += 1
            self._start += 1
            return self._limiter.safe_action()
        return self._limiter.limit(found)

    def _take_action(
        self, tick: int, observation: Observation, end_s: float, report: ControlReport
    ) -> FloatArray | None:
        """Returns the chunk's action of a tick; None before the first chunk."""
        self._receive(tick, 0.0, report)
        left = self._rest(tick)
        overlaps = self._mode == "rtc"
        is_due = self._current is None or tick - self._current.start >= self._executed
        is_due |= len(left) <= max(self._delays)
        if self._pending is None and (is_due if overlaps else not len(left)):
            prefix = left if overlaps and len(left) else None
            delay = 0 if prefix is None else min(max(self._delays), len(prefix), self._client.schema.chunk - 1)
            self._pending = self._client.begin(
                observation, self._settings.prompt, prefix=prefix, delay=delay, last_action=self._limiter.previous
            )
            self._asked_at = self._start = tick
        if not len(left):  # nothing to execute: the answer may still arrive within this tick
            self._receive(tick, end_s - time.perf_counter(), report)
            left = self._rest(tick)
        return left[0] if len(left) else None

    def _receive(self, tick: int, wait_s: float, report: ControlReport) -> None:
        """Takes the pending chunk, if it arrives within `wait_s`. Raises the error of the request."""
        if self._pending is None:
            return
        try:
            chunk = self._pending.result(timeout=max(0.0, wait_s))
        except FutureTimeoutError:
            return
        self._pending = None
        report.chunks += 1
        report.latencies_s.append(chunk.latency_s)
        report.server_s.append(chunk.server_s)
        self._last_chunk_s = time.perf_counter()
        self._delays.append(max(1, tick - self._asked_at))
        length = self._executed if self._mode == "stop-and-wait" else len(chunk.actions)
        self._current = _Current(chunk.actions[:length], self._start)

    def _rest(self, tick: int) -> FloatArray:
        """Returns the actions of the current chunk from a tick on."""
        if self._current is None:
            return np.zeros((0, self._client.schema.size), np.float32)
        return self._current.actions[max(0, tick - self._current.start) :]

    def _end_intervention(self, report: ControlReport) -> None:
        """Ends an intervention, and keeps its actions."""
        shown, ticks, self._shown, self._ticks = self._shown, self._ticks, [], []
        if not shown:
            return
        report.interventions += 1
        self._last_chunk_s = time.perf_counter()
        rewards, last = [tick.reward for tick in ticks], ticks[-1]
        measured = [reward for reward in rewards if reward is not None]
        is_measured = len(measured) == len(shown)
        ends = np.arange(len(shown)) == len(shown) - 1
        self._interventions.append(
            Intervention(
                observations=stack_observations([observation for observation, _ in shown]),
                actions=np.stack([action for _, action in shown]),
                prompt=self._settings.prompt or self._client.schema.known_instructions[0],
                rewards=np.asarray(measured, np.float32) if is_measured else None,
                terminated=ends & last.terminated if is_measured else None,
                success=last.success,
            )
        )


def _check_settings(settings: ControlSettings, schema: PolicySchema) -> None:
    """Raises UserError for a value that no policy allows, and for real-time chunking without chunks."""
    if settings.mode is not None and settings.mode not in get_args(Mode):
        raise UserError(f"mode = {settings.mode!r}: it must be one of {', '.join(map(repr, get_args(Mode)))}.")
    if settings.control_hz is not None and not settings.control_hz > 0:
        raise UserError(f"control_hz={settings.control_hz}: it must be above 0.")
    if settings.executed is not None and settings.executed < 1:
        raise UserError(f"executed={settings.executed}: it must be 1 or more.")
    if settings.mode == "rtc" and schema.chunk == 1:
        raise UserError(
            "mode = 'rtc' executes the rest of a chunk while the next chunk is computed, and the policy "
            f"{schema.policy!r} gives one action per request. Set mode='stop-and-wait', or serve a policy with chunks."
        )
