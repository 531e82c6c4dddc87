"""A trial call of a user's own reward before a model is loaded."""

from interlace.core.errors import UserError
from interlace.core.types import NO_GROUP, Prompt, Sample, SampleKey
from interlace.rewards.base import RewardConfig, load_rewards, reward_names
from interlace.rewards.results import WRONG_TYPE
from interlace.rewards.scorer import Scorer


async def try_reward(config: RewardConfig | None, prompt: Prompt) -> None:
    """Scores the answer of a prompt as if it were a response. Raises UserError if the value is not a reward.

    An exception, or a time limit that is exceeded, is no reason to stop: other responses may be scored. Built-ins are
    not tried.
    """
    if config is None or config.model is not None or not any(":" in name for name in reward_names(config)):
        return
    response = prompt.answer if config.tag is None else f"<{config.tag}>{prompt.answer}</{config.tag}>"
    scorer = Scorer(config)
    try:
        [result] = await scorer.score([Sample(key=SampleKey(NO_GROUP, 0), prompt=prompt, text=response)])
    finally:
        scorer.close()
    if result.failure is not None and result.failure.startswith(WRONG_TYPE):
        name = ", ".join(call.name for call in load_rewards(config).calls)
        raise UserError(f"reward {name!r}: {result.failure.removeprefix(WRONG_TYPE)}.")
