"""A task whose state has every part that MuJoCo integrates: activations, mocap bodies and the solver's warm start."""

from typing import Any

import numpy as np

from interlace.robots.envs.mujoco_tasks import BatchPhysics, MujocoTask, TaskResult


class Towed(MujocoTask):
    """A cart on a rail, driven by a filtered force and tied to a mocap body that stands elsewhere in each start."""

    mjcf = """
    <mujoco model="towed">
      <worldbody>
        <body name="post" mocap="true" pos="0 0 0"/>
        <body name="cart">
          <joint name="slide" type="slide" axis="1 0 0" damping=".1" limited="true" range="-.4 .4"/>
          <geom type="sphere" size=".1" mass="1" contype="0" conaffinity="0"/>
        </body>
      </worldbody>
      <equality><connect body1="cart" body2="post" anchor="0 0 0" solref=".1 1"/></equality>
      <actuator>
        <general joint="slide" dyntype="filter" dynprm=".2" gainprm="5" ctrllimited="true" ctrlrange="-1 1"/>
      </actuator>
    </mujoco>
    """
    num_substeps = 3

    def draw_start(self, random: np.random.Generator, start: Any) -> None:
        start.qpos[0] = random.uniform(-0.1, 0.1)
        start.act[0] = random.uniform(-0.5, 0.5)
        start.mocap_pos[0] = random.uniform(-0.3, 0.3), 0.0, 0.0

    def observe(self, xp: Any, physics: BatchPhysics) -> Any:
        return xp.concatenate([physics.qpos, physics.qvel, physics.ctrl], axis=-1)

    def judge(self, xp: Any, physics: BatchPhysics) -> TaskResult:
        never = xp.zeros_like(physics.qpos[:, 0] > 0)
        return TaskResult(reward=-xp.abs(physics.qpos[:, 0]), terminated=never, success=never)
