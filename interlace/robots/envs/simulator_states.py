"""SimulatorStates of a vector of environments, each in the state of one environment at a time."""

from dataclasses import dataclass
from typing import Any

from interlace.core.errors import UserError
from interlace.robots.envs.base import Simulator
from interlace.robots.envs.spec import EnvSettings
from interlace.rollouts.envs.jobs import Start
from interlace.rollouts.envs.spec import Observation


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
            self.save_present(one.start.task, slot)
            simulator.load(one.state)
            self._present[place] = slot
        return simulator

    def save_present(self, task: int, slot: int) -> None:
        """Saves the state that the simulator of a slot is in, if it is the state of another environment."""
        present = self._present.get(self._find_place(task, slot))
        if present is not None and present != slot:
            self.save(present)

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
