"""Check that a data set has the arrays and actions of the recipe's robot."""

from interlace.core.errors import UserError
from interlace.models.action_tokens import ActionTokens
from interlace.models.inputs import STATE
from interlace.robots.envs.fleet import read_spec
from interlace.robots.episodes.robot import RobotConfig
from interlace.rollouts.envs.spec import Observation


def check_recorded_arrays(
    setting: str, observation: Observation, action_size: int, config: RobotConfig, actions: ActionTokens
) -> None:
    """Raises UserError if a data set lacks an array that the policy reads, or has arrays or actions of other sizes.

    setting: key and value of the data set. observation: one recorded observation. action_size: numbers of a recorded
    action.
    """
    reads = actions.reads
    if action_size != actions.simulator_size or any(name not in observation for name in reads.shapes):
        raise UserError(
            f"{setting} has actions of {action_size} numbers and the arrays {sorted(observation)}; the policy needs "
            f"{actions.simulator_size} numbers and the arrays {sorted(reads.shapes)}. Name a data set of the same "
            "robot."
        )
    given = read_spec(config.env).observation
    for name in reads.shapes:
        found, wanted = observation[name].shape, given[name].shape
        if found != wanted and (name == STATE or not reads.takes(name, found)):
            raise UserError(
                f"{setting} has the array {name!r} of shape {list(found)}, and the simulators of the recipe give "
                f"{list(wanted)}. Name a data set of the same robot."
            )
