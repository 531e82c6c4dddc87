"""An environment without rendering."""

from interlace.robots.envs.base import EnvSettings, Simulator
from tests.contract.envs import Walk


class Blind(Walk):
    """A walk in the dark."""

    render = Simulator.render


class Pictured(Blind):
    """One that a policy asks pictures of, which are tried when it is made."""

    def __init__(self, settings: EnvSettings, task: str) -> None:
        super().__init__(settings, task)
        self.render()
