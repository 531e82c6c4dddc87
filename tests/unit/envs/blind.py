"""An environment that cannot be drawn."""

from interlace.envs.base import Simulator
from tests.contract.envs import Walk


class Blind(Walk):
    """A walk in the dark."""

    render = Simulator.render
