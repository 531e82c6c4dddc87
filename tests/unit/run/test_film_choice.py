"""The episodes that are filmed: the best, the worst and a random failure."""

from interlace.core.types import RewardResult
from interlace.run.films import BEST, FAILURE, WORST, choose_films


def episodes(*outcomes: tuple[float, float]) -> list[RewardResult]:
    """Makes results of (return, length)."""
    return [RewardResult(parts={"env/return": gained, "env/episode_length": length}) for gained, length in outcomes]


def test_success_return_and_length_order_the_episodes() -> None:
    results = episodes((1, 50), (9, 80), (9, 40), (3, 30), (0, 10), (2, 20))
    right = [True, True, True, False, False, False]
    chosen = choose_films(results, right, seed=0)
    assert chosen[2] == BEST and chosen[4] == WORST, "a quick success is the best"
    assert (
        sorted(chosen.values()) == [BEST, FAILURE, WORST]
        and not right[next(k for k, v in chosen.items() if v == FAILURE)]
    )
    assert chosen == choose_films(results, right, seed=0), "the same at each evaluation"
    picks = {
        place for seed in range(40) for place, label in choose_films(results, right, seed).items() if label == FAILURE
    }
    assert picks == {3, 5}


def test_few_episodes_and_errors() -> None:
    assert choose_films([], [], seed=0) == {}
    assert choose_films(episodes((1, 5)), [True], seed=0) == {0: BEST}
    broken = RewardResult(failure="the simulator died")
    assert choose_films([broken, *episodes((0, 9), (1, 9))], [False, False, True], seed=0) == {1: WORST, 2: BEST}
    assert choose_films([broken], [False], seed=0) == {}
