"""The metrics of a step depend on its samples, not on the order of their ends."""

from interlace.core.types import EMPTY_INT, Prompt, Sample, SampleKey
from interlace.flows.step_metrics import _rewards

PROMPT = Prompt(uid="q", token_ids=EMPTY_INT, text="", answer="")


def test_reward_metrics_do_not_depend_on_the_order_in_which_samples_ended() -> None:
    samples = [
        Sample(key=SampleKey(0, index), prompt=PROMPT, reward=value, reward_parts={"task": value})
        for index, value in enumerate((0.1, 0.2, 0.3))
    ]
    assert _rewards(samples) == _rewards(samples[::-1])
