"""Zero variance is counted by group, and percentiles are lengths that occurred."""

from interlace.algorithms import create_algorithm
from interlace.core.episode_counts import EpisodeCounts
from interlace.core.types import EMPTY_INT, Prompt, Sample, SampleGroup, SampleKey
from interlace.flows.step_metrics import episode_metrics, group_metrics, length_percentiles

PROMPT = Prompt(uid="q", token_ids=EMPTY_INT, text="", answer="")


def scored(gid: int, *rewards: float | None) -> list[Sample]:
    return [Sample(key=SampleKey(gid, index), prompt=PROMPT, reward=reward) for index, reward in enumerate(rewards)]


def test_a_group_with_equal_rewards_has_no_variance() -> None:
    samples = [*scored(0, 1.0, 1.0), *scored(1, 1.0, 0.0), *scored(2, 0.0, 0.0, None), *scored(3, 0.5, 0.25)]
    assert group_metrics(samples) == {"groups/zero_variance": 0.5}


def test_rewards_are_equal_as_in_the_advantages_in_float32() -> None:
    group = SampleGroup(gid=0, step=0, samples=tuple(scored(0, 0.1 + 0.2, 0.3)))
    assert group_metrics(group.samples) == {"groups/zero_variance": 1}
    algorithm = create_algorithm("dapo", {})
    assert not algorithm.keeps(group)
    assert algorithm.keeps(SampleGroup(gid=0, step=0, samples=tuple(scored(0, 0.3, 0.4))))


def test_a_group_of_one_scored_sample_is_not_counted() -> None:
    assert group_metrics([*scored(0, 1.0), *scored(1, 1.0, None), *scored(2, None, None)]) == {}


def test_percentiles_are_of_the_nearest_rank() -> None:
    assert length_percentiles(range(100, 0, -1)) == {
        "response_length/p50": 50, "response_length/p90": 90, "response_length/p99": 99,
    }  # fmt: skip
    assert set(length_percentiles([7]).values()) == {7}
    assert length_percentiles([]) == {}


def test_the_median_time_of_two_tool_calls_is_the_shorter_one() -> None:
    counts = [
        EpisodeCounts(num_turns=1, num_branches=1, history_tokens=0, reused_tokens=0, tool_s=(seconds,))
        for seconds in (9.0, 1.0)
    ]
    found = episode_metrics(counts)
    assert (found["episode/tool_s_p50"], found["episode/tool_s_p99"]) == (1.0, 9.0)
