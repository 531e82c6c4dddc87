"""Settings of a policy server."""

from pydantic import Field

from interlace.core.config import Config
from interlace.robots.serving.limits import SafetyLimits


class ServingSettings(Config):
    """Settings of `interlace serve --policy`; on the command line `policy.KEY=VALUE`."""

    control_hz: float = Field(default=10.0, gt=0, le=1000)
    """Actions per second of the robot, which the schema states."""
    sample: bool = False
    """True to sample chunks; False for the most probable chunk. A published policy (SmolVLA, pi0, pi0.5) begins with
    noise of a fixed seed, and with `sample` with new noise for each chunk."""
    limits: SafetyLimits | None = None
    """Limits that the server applies to actions. A bound that is not set is the bound of the simulator's actions."""
    record: str | None = None
    """New folder for the actions of humans, a LeRobotDataset. If None, the server refuses them."""
