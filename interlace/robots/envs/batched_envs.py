"""Vector of environments over batch simulators, one for each task: all environments of a call are stepped together.

Shapes: B = environments of a simulator, n = environments of a call, K = actions of a chunk, A = numbers of one action.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.core.types import FloatArray
from interlace.robots.envs.base import ChunkResult, select_row
from interlace.robots.envs.batch import BatchSettings, BatchSimulator, DeviceArray
from interlace.robots.envs.slots import (
    EnvSlot,
    SlotEnvs,
    describe_error,
    find_invalid_result,
    make_empty_result,
    make_offload_error,
    make_spec,
    reset_checked,
)
from interlace.rollouts.envs.spec import Array, ArraySpec, Observation, Start

SavedRow: TypeAlias = tuple[object, Observation]
"""Result of BatchSimulator.save() for an environment, and its stacked observations; empty if they are not stacked."""


class ChunkRunner:
    """One batch simulator with its stacked observations. Chunks run on the device; their results are read at the end.

    rows: numbers of environments, in the order of the results.
    """

    def __init__(self, simulator: BatchSimulator, settings: BatchSettings) -> None:
        self.simulator, self._settings = simulator, settings
        self._frames: dict[str, DeviceArray] = {}
        """[B, ..., F x D] stacked observations, F of D numbers each; empty if observations are not stacked."""
        xp = simulator.xp
        self._add_step = simulator.compile(partial(_add_step, xp, settings.end_on_success))
        self._end_action = simulator.compile(_end_action)
        self._push_frame = simulator.compile(partial(_push_frame, xp))

    def reset(self, starts: Mapping[int, Start]) -> Observation:
        """Starts episodes. Returns the observations, [n, ...]."""
        mask = self._make_mask([*starts])
        self.simulator.reset(mask, starts)
        if (count := self._settings.frame_stack) > 1:
            found = self.simulator.observe(mask)
            old = self._frames or {
                name: self.simulator.xp.concatenate([array] * count, axis=-1) for name, array in found.items()
            }
            for _ in range(count):
                old = {name: self._push_frame(old[name], array, mask) for name, array in found.items()}
            self._frames = old
        return self.observe([*starts])

    def run(self, rows: Sequence[int], actions: FloatArray, left: NDArray[np.int64]) -> ChunkResult:
        """Executes a chunk, [n, K, A], within the bounds of actions. left: [n] actions until the horizon, from 1."""
        simulator, shape = self.simulator, (self.simulator.num_envs, actions.shape[1])
        given = np.zeros((*shape, actions.shape[2]), np.float32)
        given[rows] = actions
        is_last = np.zeros(shape, np.bool_)
        is_last[rows] = np.arange(shape[1]) == left[:, None] - 1
        given_BKA, is_last_BK = simulator.to_device(given), simulator.to_device(is_last)
        none = simulator.to_device(np.zeros(shape[0], np.bool_))
        zero = simulator.to_device(np.zeros(shape[0], np.float32))
        active, success = self._make_mask(rows), none
        columns: list[list[DeviceArray]] = []
        for k in range(min(shape[1], int(left.max(initial=0)))):
            flags = (active, zero, none, none, success)
            for _ in range(self._settings.action_repeat):
                step = simulator.step(given_BKA[:, k], flags[0])
                flags = self._add_step(*flags, step.reward, step.terminated, step.truncated, step.success)
            running, reward, terminated, truncated, success = flags
            still_active, truncated = self._end_action(running, active, truncated, is_last_BK[:, k])
            if self._frames:
                found = simulator.observe(active)
                self._frames = {name: self._push_frame(self._frames[name], found[name], active) for name in found}
            columns.append([reward, terminated, truncated, active])
            active = still_active
        return self._read_results(rows, shape[1], columns, success)

    def observe(self, rows: Sequence[int]) -> Observation:
        """Returns the current observations, [n, ...], read from the device."""
        found = self._frames or self.simulator.observe(self._make_mask(rows))
        return {name: self.simulator.to_host(array)[list(rows)] for name, array in found.items()}

    def save(self, rows: Sequence[int]) -> list[SavedRow]:
        """Returns whole states. Raises UserError if the simulator cannot save them."""
        states, frames = self.simulator.save(rows), self.observe(rows) if self._frames else {}
        return [(state, select_row(frames, place)) for place, state in enumerate(states)]

    def load(self, saved: Mapping[int, SavedRow]) -> None:
        """Restores states by the number of the environment."""
        self.simulator.load({row: state for row, (state, _) in saved.items()})
        if self._settings.frame_stack > 1:
            mask, frames = self._make_mask([*saved]), {}
            for name, one in next(iter(saved.values()))[1].items():
                given = np.zeros((self.simulator.num_envs, *one.shape), one.dtype)
                for row, (_, found) in saved.items():
                    given[row] = found[name]
                loaded = self.simulator.to_device(given)
                frames[name] = _select(self.simulator.xp, mask, loaded, self._frames.get(name, loaded))
            self._frames = frames

    def _make_mask(self, rows: Sequence[int]) -> DeviceArray:
        mask = np.zeros(self.simulator.num_envs, np.bool_)
        mask[list(rows)] = True
        return self.simulator.to_device(mask)

    def _read_results(
        self, rows: Sequence[int], num_actions: int, columns: Sequence[Sequence[DeviceArray]], success: DeviceArray
    ) -> ChunkResult:
        simulator, result = self.simulator, make_empty_result(len(rows), num_actions)
        result.success[:] = simulator.to_host(success)[list(rows)]
        arrays = (result.reward, result.terminated, result.truncated, result.valid)
        for array, column in zip(arrays, zip(*columns, strict=True), strict=False):
            array[:, : len(columns)] = simulator.to_host(simulator.xp.stack(list(column), 1))[list(rows)]
        observation = self.observe(rows)
        wrong, failures = simulator.find_failures(rows), {}
        for place, row in enumerate(rows):
            invalid = find_invalid_result(select_row(observation, place), result.reward[place])
            if reason := wrong.get(row) or invalid:
                failures[place] = reason
        return replace(result, observation=observation, failures=failures)


class BatchedEnvs(SlotEnvs):
    """Environments of batch simulators. Environment s is number s of the simulator of its episode's task."""

    def __init__(self, kind: type[BatchSimulator], settings: BatchSettings, num_envs: int) -> None:
        """Raises UserError if a task cannot be created, or two tasks have different shapes."""
        super().__init__(settings, num_envs)
        self._kind, self._batch_settings = kind, settings
        self._runners = self._make_runners()
        self._is_offloaded = False
        spec = make_spec([runner.simulator for runner in self._runners.values()], settings)
        self.spec = replace(
            spec,
            observation={
                name: ArraySpec(shape=(*one.shape[:-1], one.shape[-1] * settings.frame_stack), dtype=one.dtype)
                for name, one in spec.observation.items()
            },
        )

    def prepare(self) -> None:
        """Compiles everything by a reset and two actions: the second call of a compiled function may compile again."""
        for task, runner in self._runners.items():
            runner.reset({0: Start(task=task, init_state=0)})
            for _ in range(2):
                runner.run([0], np.zeros((1, 1, self.spec.action.size), np.float32), np.ones(1, np.int64))

    def _reset_slots(self, starts: Mapping[int, Start]) -> None:
        for task in sorted({start.task for start in starts.values()}):
            self._reset_task(task, {slot: start for slot, start in starts.items() if start.task == task})

    def render(self, slots: Sequence[int] | None = None) -> list[NDArray[np.uint8]]:
        return [self._find_runner(slot).simulator.render(slot) for slot in self._choose_slots(slots)]

    def expert_actions(self, slots: Sequence[int] | None = None, count: int = 1) -> Array:
        chosen = self._choose_slots(slots)
        return np.stack([self._find_runner(slot).simulator.expert_actions(slot, count) for slot in chosen])

    def offload(self) -> None:
        """Frees the simulators and keeps the states. Raises UserError if the simulator cannot save them."""
        self._save([*self._slots])
        self._close_runners()
        self._is_offloaded = True

    def onload(self) -> None:
        if self._is_offloaded:
            self._is_offloaded = False
            self._runners = self._make_runners()
            self._load([*self._slots])

    def close(self) -> None:
        self._close_runners()
        self._slots.clear()

    def _make_runners(self) -> dict[int, ChunkRunner]:
        settings = self._batch_settings
        return {
            task: ChunkRunner(self._kind(settings, name, self.num_envs), settings)
            for task, name in enumerate(settings.tasks)
        }

    def _close_runners(self) -> None:
        for runner in self._runners.values():
            runner.simulator.close()
        self._runners = {}

    def _check_present(self) -> None:
        if self._is_offloaded:
            raise make_offload_error()

    def _find_runner(self, slot: int) -> ChunkRunner:
        self._check_present()
        return self._runners[self._slots[slot].start.task]

    def _reset_task(self, task: int, starts: Mapping[int, Start]) -> None:
        self._check_present()
        observation = reset_checked(self._settings.tasks[task], lambda: self._runners[task].reset(starts))
        for place, (slot, start) in enumerate(starts.items()):
            self._slots[slot] = EnvSlot(start=start, observation=select_row(observation, place))

    def _step_slots(self, chosen: Sequence[int], actions: Array, result: ChunkResult) -> None:
        self._check_present()
        bounds = self.spec.action
        clipped = np.clip(actions, bounds.low, bounds.high).astype(np.float32)
        for task in sorted(self._runners):
            self._step_task(task, chosen, clipped, result)

    def _step_task(self, task: int, chosen: Sequence[int], actions: FloatArray, result: ChunkResult) -> None:
        """Steps the environments of a task whose episodes are not over."""
        places = [
            place
            for place, slot in enumerate(chosen)
            if (one := self._slots[slot]).start.task == task and not one.is_over
        ]
        rows = [chosen[place] for place in places]
        if not rows:
            return
        left = np.array([self._settings.horizon - self._slots[slot].num_actions for slot in rows], np.int64)
        try:
            found = self._runners[task].run(rows, actions[places], left)
        except UserError:
            raise
        except Exception as error:  # noqa: BLE001 - any error of a simulator ends only the episodes of this call
            for slot in rows:
                self._slots[slot].broken, self._slots[slot].is_over = f"it raised {describe_error(error)}", True
            return
        for name in ("reward", "terminated", "truncated", "valid"):
            getattr(result, name)[places] = getattr(found, name)
        for row, slot in enumerate(rows):
            one = self._slots[slot]
            one.num_actions += int(found.valid[row].sum())
            one.success |= bool(found.success[row])
            one.broken = found.failures.get(row, "")
            one.is_over = bool(found.ended[row] or one.broken)
            if not one.broken:
                one.observation = select_row(found.observation, row)

    def _save(self, slots: Sequence[int]) -> None:
        for task, runner in self._runners.items():
            rows = [slot for slot in slots if self._slots[slot].start.task == task]
            if rows:
                for slot, state in zip(rows, runner.save(rows), strict=True):
                    self._slots[slot].state = state

    def _load(self, slots: Sequence[int]) -> None:
        for task, runner in self._runners.items():
            if saved := {slot: self._slots[slot].state for slot in slots if self._slots[slot].start.task == task}:
                runner.load(saved)


def _add_step(xp: ModuleType, end_on_success: bool, *arrays: DeviceArray) -> tuple[DeviceArray, ...]:
    """Adds a simulator step to an action; all arrays are [B].

    arrays: environments that run, then reward, terminated, truncated and success of the action so far, then the same
    four of the step. Returns the first five after the step.
    """
    running, reward, terminated, truncated, success, step_reward, step_terminated, step_truncated, step_success = arrays
    ends = running & ((step_terminated | step_success) if end_on_success else step_terminated)
    cut = running & step_truncated & ~ends
    added = xp.where(running, step_reward, 0 * reward)
    return (
        running & ~ends & ~cut,
        reward + added,
        terminated | ends,
        truncated | cut,
        success | (running & step_success),
    )


def _end_action(
    running: DeviceArray, active: DeviceArray, truncated: DeviceArray, is_last: DeviceArray
) -> tuple[DeviceArray, DeviceArray]:
    """Returns the environments whose episodes continue after an action, and those that a limit ended; all [B].

    running: environments that no step ended. active: environments that began the action.
    """
    return running & ~is_last, truncated | (active & running & is_last)


def _select(xp: ModuleType, mask: DeviceArray, chosen: DeviceArray, other: DeviceArray) -> DeviceArray:
    """Returns rows of `chosen` within the mask, and of `other` outside of it."""
    shaped = mask.reshape(mask.shape[0], *[1] * (len(chosen.shape) - 1))
    return xp.where(shaped, chosen, other)


def _push_frame(xp: ModuleType, frames: DeviceArray, frame: DeviceArray, mask: DeviceArray) -> DeviceArray:
    """Appends the current observation, [B, ..., D], to stacked ones, [B, ..., F x D], within the mask."""
    newer = xp.concatenate([frames[..., frame.shape[-1] :], frame], axis=-1)
    return _select(xp, mask, newer, frames)
