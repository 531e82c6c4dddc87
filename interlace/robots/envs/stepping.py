"""Vector of environments of one family, from a class that simulates one at a time, and the states that it swaps."""

import pickle
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from interlace.core.errors import UserError
from interlace.robots.envs.base import Simulator, VectorEnv
from interlace.robots.envs.spec import ChunkResult, EnvSettings, stack_observations
from interlace.rollouts.envs.jobs import Start
from interlace.rollouts.envs.spec import Array, EnvSpec, Observation, SimulatorError

_KEPT_STARTS = 512
"""Number of cached states after a reset, if states are swapped: the samples of a group share an initial state."""


@dataclass(slots=True, kw_only=True)
class EnvSlot:
    """One environment."""

    start: Start
    observation: Observation
    state: Any = None
    """State of the environment when its simulator last switched to another one."""
    num_actions: int = 0
    is_over: bool = False
    success: bool = False
    broken: str = ""
    """Reason why its simulator failed; empty while it works."""


class SimulatorStates:
    """The simulators of environments of one family.

    If the family swaps states, all environments share one simulator per task. Otherwise each has a separate simulator,
    created at the first reset to its task.
    """

    def __init__(self, kind: type[Simulator], settings: EnvSettings) -> None:
        self._kind, self._settings = kind, settings
        self.slots: dict[int, EnvSlot] = {}
        """The environments that have been reset."""
        self._simulators: dict[tuple[int, int], Simulator] = {}
        """SimulatorStates by (task, slot); the slot is 0 if all share one."""
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
            raise UserError("the environments are offloaded: onload() comes before the next call")
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
        """Frees all simulators."""
        for simulator in self._simulators.values():
            simulator.close()
        self._simulators.clear()
        self._present.clear()


class SimulatedEnvs(VectorEnv):
    """Environments that take turns on their simulators."""

    def __init__(self, kind: type[Simulator], settings: EnvSettings, num_envs: int) -> None:
        """Raises UserError if a task cannot be created, or two tasks have different shapes."""
        super().__init__(settings, num_envs)
        self._kind, self._settings = kind, settings
        self._simulators = SimulatorStates(kind, settings)
        self._starts: OrderedDict[Start, tuple[Any, Observation]] = OrderedDict()
        self.spec = self._make_spec()

    def reset(
        self,
        *,
        seeds: Sequence[int],
        task_ids: Sequence[int],
        init_state_ids: Sequence[int],
        slots: Sequence[int] | None = None,
    ) -> Observation:
        """Starts episodes; see VectorEnv."""
        chosen = self._choose_slots(slots)
        found = []
        for slot, seed, task, state in zip(chosen, seeds, task_ids, init_state_ids, strict=True):
            found.append(self._reset_slot(slot, Start(task=int(task), init_state=int(state), seed=int(seed))))
        return stack_observations(found)

    def chunk_step(self, actions: Array, slots: Sequence[int] | None = None) -> ChunkResult:
        """Executes a chunk; see VectorEnv."""
        chosen = self._choose_slots(slots)
        given = np.asarray(actions)
        size = self.spec.action.size
        if given.ndim != 3 or len(given) != len(chosen) or given.shape[2] != size:
            raise UserError(
                f"actions of shape {given.shape} for {len(chosen)} environments: it must be [n, K, A] with "
                f"n = {len(chosen)} and A = {size}"
            )
        shape = given.shape[:2]
        flags = [np.zeros(shape, np.bool_) for _ in range(3)]
        result = ChunkResult(
            observation={},
            reward=np.zeros(shape, np.float32),
            terminated=flags[0],
            truncated=flags[1],
            valid=flags[2],
            success=np.zeros(len(chosen), np.bool_),
            failures={},
        )
        failures = {}
        for row, slot in enumerate(chosen):
            if reason := self._step_slot(slot, given[row], result, row):
                failures[row] = reason
        return replace(result, observation=self.observe(chosen), failures=failures)

    def observe(self, slots: Sequence[int] | None = None) -> Observation:
        """Returns the current observations."""
        return stack_observations([self._simulators.slots[slot].observation for slot in self._choose_slots(slots)])

    def get_state(self, slots: Sequence[int] | None = None) -> list[bytes]:
        """Returns whole states; see VectorEnv."""
        found = []
        for slot in self._choose_slots(slots):
            self._simulators.save(slot)
            found.append(pickle.dumps(self._simulators.slots[slot], protocol=5))
        return found

    def set_state(self, states: Sequence[bytes], slots: Sequence[int] | None = None) -> None:
        """Restores states; see VectorEnv."""
        for slot, state in zip(self._choose_slots(slots), states, strict=True):
            found: EnvSlot = pickle.loads(state)
            self._simulators.slots[slot] = found
            self._simulators.forget(slot)

    def render(self, slots: Sequence[int] | None = None) -> list[NDArray[np.uint8]]:
        """Draws the current states. Converts any error of a renderer to a UserError, because drawing is optional."""
        return [self._draw_picture(self._simulators.enter(slot)) for slot in self._choose_slots(slots)]

    def expert_actions(self, slots: Sequence[int] | None = None, count: int = 1) -> Array:
        """Returns a scripted expert's next actions. Beyond the end of an episode, its last action is repeated."""
        chosen = self._choose_slots(slots)
        return np.stack([self._play_expert(self._simulators.enter(slot), count) for slot in chosen])

    def offload(self) -> None:
        """Frees the simulators and keeps the states."""
        for slot in self._simulators.slots:
            self._simulators.save(slot)
        self._simulators.close()
        self._simulators.is_offloaded = True

    def onload(self) -> None:
        """Allows simulators to be created again, each when it is next needed."""
        self._simulators.is_offloaded = False

    def close(self) -> None:
        """Frees all resources."""
        self._simulators.close()
        self._simulators.slots.clear()
        self._starts.clear()

    @staticmethod
    def _draw_picture(simulator: Simulator) -> NDArray[np.uint8]:
        try:
            return simulator.render()
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"{simulator.task!r} cannot be drawn: {_describe_error(error)}") from error

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
            raise SimulatorError(f"the expert of {simulator.task!r} raised {_describe_error(error)}") from error
        finally:
            if count > 1:
                simulator.load(state)
        return np.stack(found)

    def _make_spec(self) -> EnvSpec:
        simulators = [self._simulators.find(task, 0) for task in range(len(self._settings.tasks))]
        first = simulators[0]
        for other in simulators[1:]:
            if other.observation_spec != first.observation_spec or not _have_equal_actions(other, first):
                raise UserError(
                    f"tasks {first.task!r} and {other.task!r} differ in the shape of observations or actions; "
                    "one policy serves tasks that are alike in both"
                )
        texts = [self._settings.instructions.get(one.task, one.instruction) for one in simulators]
        return EnvSpec(
            observation=first.observation_spec,
            action=first.action_spec,
            tasks=self._settings.tasks,
            instructions=tuple(texts),
            horizon=self._settings.horizon,
        )

    def _choose_slots(self, slots: Sequence[int] | None) -> Sequence[int]:
        return range(self.num_envs) if slots is None else [int(slot) for slot in slots]

    def _reset_slot(self, slot: int, start: Start) -> Observation:
        if not 0 <= start.task < len(self._settings.tasks):
            raise UserError(f"task id {start.task}: there are {len(self._settings.tasks)} tasks, from 0")
        self._simulators.drop_other_tasks(slot, start.task)
        simulator = self._simulators.find(start.task, slot)
        kept = self._starts.get(start) if self._kind.swaps else None
        if kept:
            self._starts.move_to_end(start)
            self._simulators.save_present(start.task, slot)
            self._simulators.slots[slot] = EnvSlot(start=start, state=kept[0], observation=kept[1])
            self._simulators.forget(slot)
            return kept[1]
        self._simulators.leave(start.task, slot)
        try:
            simulator.reset(start.init_state, start.seed)
            observation = simulator.observe()
        except UserError:
            raise
        except Exception as error:
            raise SimulatorError(f"the reset of {simulator.task!r} raised {_describe_error(error)}") from error
        if reason := _find_invalid_array(observation):
            raise SimulatorError(f"the reset of {simulator.task!r} gave {reason}")
        self._simulators.slots[slot] = EnvSlot(start=start, observation=observation)
        self._simulators.set_present(start.task, slot)
        if self._kind.swaps and self._kind.keeps_starts:
            self._starts[start] = (simulator.save(), observation)
            while len(self._starts) > _KEPT_STARTS:
                self._starts.popitem(last=False)
        return observation

    def _step_slot(self, slot: int, actions: Array, result: ChunkResult, row: int) -> str:
        """Steps one environment and writes its row except the observation. Returns the failure's reason, or an empty
        text.
        """
        one = self._simulators.slots.get(slot)
        if one is None:
            raise UserError(f"environment {slot} was not reset before its first chunk")
        if not one.is_over:
            try:
                one.broken = self._run_actions(one, self._simulators.enter(slot), actions, result, row)
            except UserError:
                raise
            except Exception as error:  # noqa: BLE001 - any error of a simulator ends only this episode
                one.broken = f"it raised {_describe_error(error)}"
            if one.broken:
                one.is_over = True
                self._simulators.forget(slot)
        result.success[row] = one.success
        return one.broken

    def _run_actions(self, one: EnvSlot, simulator: Simulator, actions: Array, result: ChunkResult, row: int) -> str:
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
        reason = _find_invalid_array(observation) or (
            "" if np.isfinite(result.reward[row]).all() else "a reward that is NaN"
        )
        if reason:
            return f"it gave {reason}"
        one.observation = observation
        return ""

    def _clip_action(self, action: Array) -> Array:
        bounds = self.spec.action
        return action if bounds.num_choices else np.clip(action, bounds.low, bounds.high)


def _have_equal_actions(one: Simulator, other: Simulator) -> bool:
    mine, its = one.action_spec, other.action_spec
    return (
        mine.num_choices == its.num_choices
        and np.array_equal(mine.low, its.low)
        and np.array_equal(mine.high, its.high)
    )


def _find_invalid_array(observation: Observation) -> str:
    for name, array in observation.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            return f"an observation {name!r} with NaN or infinity"
    return ""


def _describe_error(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
