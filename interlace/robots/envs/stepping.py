"""Vector of environments of one family, from a class that simulates one at a time, and the states that it swaps."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.robots.envs.base import ChunkResult, EnvSettings, Simulator
from interlace.robots.envs.slots import (
    EnvSlot,
    SlotEnvs,
    describe_error,
    find_invalid_result,
    make_offload_error,
    make_spec,
    reset_checked,
)
from interlace.rollouts.envs.spec import Array, Observation, SimulatorError, Start

_KEPT_STARTS = 512
"""Number of cached states after a reset, if states are swapped: the samples of a group share an initial state."""


class SimulatorStates:
    """The simulators of environments of one family.

    If the family swaps states, all environments share one simulator per task. Otherwise each has a separate simulator,
    created at the first reset to its task.
    """

    def __init__(self, kind: type[Simulator], settings: EnvSettings, slots: dict[int, EnvSlot]) -> None:
        """slots: the environments that have been reset."""
        self._kind, self._settings, self.slots = kind, settings, slots
        self._simulators: dict[tuple[int, int], Simulator] = {}
        """Simulators by (task, slot); the slot is 0 if all share one."""
        self._present: dict[tuple[int, int], int] = {}
        """(task, slot) of a simulator -> slot of the environment whose state it is in."""
        self.is_offloaded = False
        """True while no simulator may be created."""

    def set_present(self, task: int, slot: int) -> None:
        """Notes that the simulator of a slot is in the state of this environment."""
        self._present[self._find_place(task, slot)] = slot

    def enter(self, slot: int) -> Simulator:
        """Returns an environment's simulator, loaded with the environment's state."""
        one = self.slots[slot]
        place = self._find_place(one.start.task, slot)
        simulator = self.find(one.start.task, slot)
        if self._present.get(place) != slot:
            self.leave(one.start.task, slot)
            simulator.load(one.state)
            self._present[place] = slot
        return simulator

    def save_present(self, task: int, slot: int) -> None:
        """Saves the state that the simulator of a slot is in, if it is the state of another environment."""
        present = self._present.get(self._find_place(task, slot))
        if present is not None and present != slot:
            self.save(present)

    def leave(self, task: int, slot: int) -> None:
        """Saves the state as save_present() does. The simulator is then in no environment's state, so that a reset or a
        load that fails changes no other environment.
        """
        self.save_present(task, slot)
        self._present.pop(self._find_place(task, slot), None)

    def save(self, slot: int) -> None:
        """Saves an environment's state if a simulator is in it."""
        one = self.slots[slot]
        place = self._find_place(one.start.task, slot)
        if self._present.get(place) == slot:
            one.state = self._simulators[place].save()

    def forget(self, slot: int) -> None:
        """Makes the simulator reload this environment's state before its next use."""
        for place in [place for place, present in self._present.items() if present == slot]:
            del self._present[place]

    def _find_place(self, task: int, slot: int) -> tuple[int, int]:
        return task, 0 if self._kind.swaps else slot

    def find(self, task: int, slot: int) -> Simulator:
        """Returns the simulator for an environment and a task. Creates it if necessary. Raises UserError."""
        if self.is_offloaded:
            raise make_offload_error()
        place = self._find_place(task, slot)
        if place not in self._simulators:
            self._simulators[place] = self._kind(self._settings, self._settings.tasks[task])
        return self._simulators[place]

    def drop_other_tasks(self, slot: int, task: int) -> None:
        """Closes an environment's separate simulators for other tasks."""
        if self._kind.swaps:
            if slot in self.slots and self.slots[slot].start.task != task:
                self.forget(slot)
            return
        for place in [place for place in self._simulators if place[1] == slot and place[0] != task]:
            self._simulators.pop(place).close()
            self._present.pop(place, None)

    def close(self) -> None:
        for simulator in self._simulators.values():
            simulator.close()
        self._simulators.clear()
        self._present.clear()


class SimulatedEnvs(SlotEnvs):
    """Environments that take turns on their simulators."""

    def __init__(self, kind: type[Simulator], settings: EnvSettings, num_envs: int) -> None:
        """Raises UserError if a task cannot be created, or two tasks have different shapes."""
        super().__init__(settings, num_envs)
        self._kind, self._simulators = kind, SimulatorStates(kind, settings, self._slots)
        self._starts: OrderedDict[Start, tuple[Any, Observation]] = OrderedDict()
        self.spec = make_spec([self._simulators.find(task, 0) for task in range(len(settings.tasks))], settings)

    def render(self, slots: Sequence[int] | None = None) -> list[NDArray[np.uint8]]:
        """Draws the current states. Converts any error of a renderer to a UserError, because drawing is optional."""
        return [self._draw_picture(self._simulators.enter(slot)) for slot in self._choose_slots(slots)]

    def expert_actions(self, slots: Sequence[int] | None = None, count: int = 1) -> Array:
        """Returns a scripted expert's next actions. Beyond the end of an episode, its last action is repeated."""
        chosen = self._choose_slots(slots)
        return np.stack([self._play_expert(self._simulators.enter(slot), count) for slot in chosen])

    def offload(self) -> None:
        self._save([*self._slots])
        self._simulators.close()
        self._simulators.is_offloaded = True

    def onload(self) -> None:
        """Allows simulators to be created again, each when it is next needed."""
        self._simulators.is_offloaded = False

    def close(self) -> None:
        self._simulators.close()
        self._slots.clear()
        self._starts.clear()

    @staticmethod
    def _draw_picture(simulator: Simulator) -> NDArray[np.uint8]:
        try:
            return simulator.render()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{simulator.task!r} cannot be drawn: {describe_error(error)}") from error

    def _play_expert(self, simulator: Simulator, count: int) -> Array:
        """Returns the next actions [count, A] of the expert, which acts on a copy of the state."""
        found, is_over = [simulator.expert_action()], False
        state = simulator.save() if count > 1 else None
        try:
            for _ in range(count - 1):
                held = self._clip_action(found[-1])
                for _ in range(0 if is_over else self._settings.action_repeat):
                    step = simulator.step(held, is_read=True)
                    is_over |= step.terminated or step.truncated
                found.append(found[-1] if is_over else simulator.expert_action())
        except UserError:
            raise
        except Exception as error:
            raise SimulatorError(f"the expert of {simulator.task!r} raised {describe_error(error)}") from error
        finally:
            if count > 1:
                simulator.load(state)
        return np.stack(found)

    def _reset_slots(self, starts: Mapping[int, Start]) -> None:
        for slot, start in starts.items():
            self._reset_slot(slot, start)

    def _save(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._simulators.save(slot)

    def _load(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._simulators.forget(slot)

    def _reset_slot(self, slot: int, start: Start) -> None:
        self._simulators.drop_other_tasks(slot, start.task)
        simulator = self._simulators.find(start.task, slot)
        kept = self._starts.get(start) if self._kind.swaps else None
        if kept:
            self._starts.move_to_end(start)
            self._simulators.save_present(start.task, slot)
            self._slots[slot] = EnvSlot(start=start, state=kept[0], observation=kept[1])
            self._simulators.forget(slot)
            return
        self._simulators.leave(start.task, slot)

        def reset() -> Observation:
            simulator.reset(start.init_state, start.seed)
            return simulator.observe()

        observation = reset_checked(simulator.task, reset)
        self._slots[slot] = EnvSlot(start=start, observation=observation)
        self._simulators.set_present(start.task, slot)
        if self._kind.swaps and self._kind.keeps_starts:
            self._starts[start] = (simulator.save(), observation)
            while len(self._starts) > _KEPT_STARTS:
                self._starts.popitem(last=False)

    def _step_slots(self, chosen: Sequence[int], actions: Array, result: ChunkResult) -> None:
        for row, slot in enumerate(chosen):
            one = self._slots[slot]
            if one.is_over:
                continue
            try:
                one.broken = self._run_actions(one, self._simulators.enter(slot), actions[row], result, row)
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - any error of a simulator ends only this episode
                one.broken = f"it raised {describe_error(error)}"
            if one.broken:
                one.is_over = True
                self._simulators.forget(slot)

    def _run_actions(self, one: EnvSlot, simulator: Simulator, actions: Array, result: ChunkResult, row: int) -> str:
        """Executes a chunk and writes its row. Returns why the result is invalid; empty if it is valid."""
        repeat, last = self._settings.action_repeat, len(actions) - 1
        for k, action in enumerate(actions):
            held = self._clip_action(action)
            result.valid[row, k] = True
            one.num_actions += 1
            at_horizon = one.num_actions >= self._settings.horizon
            for r in range(repeat):
                step = simulator.step(held, is_read=r == repeat - 1 and (k == last or at_horizon))
                result.reward[row, k] += step.reward
                one.success |= step.success
                result.terminated[row, k] = step.terminated or (step.success and self._settings.end_on_success)
                if result.terminated[row, k] or step.truncated:
                    break
            result.truncated[row, k] = not result.terminated[row, k] and (step.truncated or at_horizon)
            if result.terminated[row, k] or result.truncated[row, k]:
                one.is_over = True
                break
        observation = simulator.observe()
        if reason := find_invalid_result(observation, result.reward[row]):
            return reason
        one.observation = observation
        return ""

    def _clip_action(self, action: Array) -> Array:
        bounds = self.spec.action
        return action if bounds.num_choices else np.clip(action, bounds.low, bounds.high)
