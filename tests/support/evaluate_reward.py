"""The result of a reward function for one response."""

from interlace.core.types import RewardResult
from interlace.rewards.base import LoadedReward, ScoreRequest, evaluate_batch
from interlace.rewards.config import RewardConfig
from interlace.rewards.signature import RewardCall, reward_call


def evaluate(function: object, config: RewardConfig, request: ScoreRequest) -> RewardResult:
    """Scores one response by one function. An exception of the function comes back as a failure."""
    call = function if isinstance(function, RewardCall) else reward_call(function)
    [result] = evaluate_batch(LoadedReward(calls=(call,)), config, [request])
    return result
