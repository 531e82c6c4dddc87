"""Tasks of MuJoCo models for simulators that step a batch: model, start, observation, reward and end of each.

| task | actions | reward per action | terminated | success |
|---|---|---|---|---|
| `cartpole-balance` | force | 1, as in gymnasium's CartPole-v1 | pole over 0.2 rad, cart over 1 m | |
| `cartpole-swingup` | force | upright x centred x slow, 0 to 1, as in dm_control | cart over 1 m | |
| `push` | force, x and y | -(box to goal) - (pusher to box) / 4, in metres | | box within 5 cm of the goal |

The models are written for this package. The cart-poles have no contacts and no other constraints; in `push`, a sphere
pushes a box that lies on a floor.

Shapes: B = environments, D = numbers of an observation. Tensors are of `xp`, torch or jax.numpy.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from interlace.core.errors import UserError, nearest
from interlace.core.plugins import concrete_subclass, load_object
from interlace.robots.envs.batch import DeviceArray


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class BatchPhysics:
    """State of all environments, on the device."""

    qpos: DeviceArray
    """[B, nq] positions of the joints."""
    qvel: DeviceArray
    """[B, nv] velocities of the joints."""
    ctrl: DeviceArray
    """[B, A] last action."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TaskResult:
    """Result of one action, [B] each."""

    reward: DeviceArray
    terminated: DeviceArray
    success: DeviceArray


class MujocoTask(ABC):
    """A task without a state: everything is a function of the physics."""

    mjcf: ClassVar[str]
    """Model, as MJCF text; each actuator is a number of an action, between the bounds of its `ctrlrange`."""
    instruction: ClassVar[str] = ""
    num_substeps: ClassVar[int] = 1
    """Steps of the physics per action."""

    @abstractmethod
    def draw_start(self, random: np.random.Generator, start: Any) -> None:
        """Changes the positions and velocities of `start`, an MjData in the model's default state, to a start."""

    @abstractmethod
    def observe(self, xp: Any, physics: BatchPhysics) -> DeviceArray:
        """Returns the observation `state`, [B, D], in a new tensor."""

    @abstractmethod
    def judge(self, xp: Any, physics: BatchPhysics) -> TaskResult:
        """Judges the state after an action, in new tensors."""


class CartpoleBalance(MujocoTask):
    """Keep the pole upright. State: place, cosine and sine of the pole's angle, and both velocities."""

    mjcf = """
    <mujoco model="cartpole">
      <option timestep="0.01"/>
      <default><geom contype="0" conaffinity="0"/></default>
      <worldbody>
        <light pos="0 -1 3"/>
        <camera name="side" pos="0 -2.6 .3" xyaxes="1 0 0 0 0 1"/>
        <geom name="rail" type="capsule" fromto="-1.2 0 0 1.2 0 0" size=".02" rgba=".5 .5 .5 1"/>
        <body name="cart">
          <joint name="slide" type="slide" axis="1 0 0" damping=".05"/>
          <geom name="cart" type="box" size=".1 .06 .05" mass="1" rgba=".3 .4 .7 1"/>
          <body name="pole">
            <joint name="hinge" type="hinge" axis="0 1 0" damping=".001"/>
            <geom name="pole" type="capsule" fromto="0 0 0 0 0 .6" size=".025" mass=".1" rgba=".8 .6 .3 1"/>
          </body>
        </body>
      </worldbody>
      <actuator><motor name="force" joint="slide" gear="10" ctrllimited="true" ctrlrange="-1 1"/></actuator>
    </mujoco>
    """
    instruction = "keep the pole upright"
    num_substeps = 2

    def draw_start(self, random: np.random.Generator, start: Any) -> None:
        """Draws each position and velocity from -0.05 to 0.05."""
        start.qpos[:] = random.uniform(-0.05, 0.05, 2)
        start.qvel[:] = random.uniform(-0.05, 0.05, 2)

    def observe(self, xp: Any, physics: BatchPhysics) -> DeviceArray:
        place, angle = physics.qpos[:, :1], physics.qpos[:, 1:]
        return xp.concatenate([place, xp.cos(angle), xp.sin(angle), physics.qvel], axis=-1)

    def judge(self, xp: Any, physics: BatchPhysics) -> TaskResult:
        place, angle = physics.qpos[:, 0], physics.qpos[:, 1]
        lost = (xp.abs(angle) > 0.2) | (xp.abs(place) > 1.0)
        return TaskResult(reward=xp.ones_like(place), terminated=lost, success=xp.zeros_like(lost))


class CartpoleSwingup(CartpoleBalance):
    """Swing the hanging pole up."""

    instruction = "swing the pole up and keep it upright"

    def draw_start(self, random: np.random.Generator, start: Any) -> None:
        """Draws a hanging pole, up to 0.1 rad from the vertical."""
        start.qpos[:] = random.uniform(-0.05, 0.05), np.pi + random.uniform(-0.1, 0.1)
        start.qvel[:] = random.uniform(-0.05, 0.05, 2)

    def judge(self, xp: Any, physics: BatchPhysics) -> TaskResult:
        """Multiplies factors that fall to 0.1 at two metres from the centre and at five radians per second."""
        place, angle = physics.qpos[:, 0], physics.qpos[:, 1]
        upright, centred = (1 + xp.cos(angle)) / 2, (1 + 0.1 ** ((place / 2) ** 2)) / 2
        slow = (1 + 0.1 ** ((physics.qvel[:, 1] / 5) ** 2)) / 2
        lost = xp.abs(place) > 1.0
        return TaskResult(reward=upright * centred * slow, terminated=lost, success=xp.zeros_like(lost))


class Push(MujocoTask):
    """Push a box to the goal. State: places of pusher and box, axis of the box, velocities, and the way to the goal."""

    mjcf = """
    <mujoco model="push">
      <option timestep="0.01"/>
      <worldbody>
        <light pos="0 -1 3"/>
        <camera name="side" pos="0 -.9 .8" xyaxes="1 0 0 0 .66 .75"/>
        <geom name="floor" type="plane" size="1 1 .1" rgba=".8 .8 .8 1"/>
        <geom name="goal" type="cylinder" pos=".3 0 0" size=".05 .001" contype="0" conaffinity="0" rgba=".3 .7 .3 1"/>
        <body name="pusher" pos="0 0 .05">
          <joint name="x" type="slide" axis="1 0 0" damping="2"/>
          <joint name="y" type="slide" axis="0 1 0" damping="2"/>
          <geom name="pusher" type="sphere" size=".03" mass=".5" rgba=".3 .4 .7 1"/>
        </body>
        <body name="box" pos="0 0 .05">
          <freejoint name="box"/>
          <geom name="box" type="box" size=".05 .05 .05" mass=".2" friction=".6 .005 .0001" rgba=".8 .5 .3 1"/>
        </body>
      </worldbody>
      <actuator>
        <motor name="x" joint="x" gear="3" ctrllimited="true" ctrlrange="-1 1"/>
        <motor name="y" joint="y" gear="3" ctrllimited="true" ctrlrange="-1 1"/>
      </actuator>
    </mujoco>
    """
    instruction = "push the box to the green disc"
    num_substeps = 4
    goal = (0.3, 0.0)
    """Centre of the disc, in metres."""

    def draw_start(self, random: np.random.Generator, start: Any) -> None:
        """Draws the place and the angle of the box, and the pusher on its left."""
        start.qpos[:2] = random.uniform((-0.3, -0.1), (-0.15, 0.1))
        start.qpos[2:4] = random.uniform((0.0, -0.1), (0.1, 0.1))
        angle = random.uniform(-0.5, 0.5)
        start.qpos[5:9] = np.cos(angle / 2), 0.0, 0.0, np.sin(angle / 2)

    def observe(self, xp: Any, physics: BatchPhysics) -> DeviceArray:
        qpos, qvel = physics.qpos, physics.qvel
        w, x, y, z = (qpos[:, number : number + 1] for number in range(5, 9))
        axis = [1 - 2 * (y * y + z * z), 2 * (x * y + w * z)]
        way = [self.goal[0] - qpos[:, 2:3], self.goal[1] - qpos[:, 3:4]]
        return xp.concatenate([qpos[:, :5], *axis, qvel[:, :4], qvel[:, 5:8], *way], axis=-1)

    def judge(self, xp: Any, physics: BatchPhysics) -> TaskResult:
        """Measures the distances in the plane, in metres."""
        pusher, box = physics.qpos[:, :2], physics.qpos[:, 2:4]
        left = xp.sqrt((box[:, 0] - self.goal[0]) ** 2 + (box[:, 1] - self.goal[1]) ** 2)
        apart = xp.sqrt(((pusher - box) ** 2).sum(-1))
        success = left < 0.05
        return TaskResult(reward=-left - apart / 4, terminated=xp.zeros_like(success), success=success)


TASKS: Mapping[str, type[MujocoTask]] = {
    "cartpole-balance": CartpoleBalance,
    "cartpole-swingup": CartpoleSwingup,
    "push": Push,
}


def find_task(name: str) -> MujocoTask:
    """Returns a task by its name, or a user's `package.module:Class`. Raises UserError."""
    if ":" in name:
        base: type[MujocoTask] = MujocoTask  # type: ignore[type-abstract]
        return concrete_subclass(f"task {name!r}", load_object("task", name), base)()
    if name not in TASKS:
        raise UserError(
            f"unknown task {name!r}.{nearest(name, TASKS)} Tasks: {', '.join(TASKS)}; your own is written "
            "package.module:Class, a MujocoTask."
        )
    return TASKS[name]()
