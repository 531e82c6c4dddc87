"""The reference works as a client of engine services."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest

from interlace.core.errors import DiskFullError, InterlaceError, UserError
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.rollout.services.protocol import ServiceError
from interlace.runtime.worker import WorkerContext
from interlace.workers.scoring import ScoringWorker


class Service:
    """Gives each token after the first minus its own id and a hundredth of the token before it."""

    def __init__(self, *, fails: int = 0, error: type[InterlaceError] = ServiceError) -> None:
        self.fails, self.num_calls, self.num_recovered = fails, 0, 0
        self.error = error

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        self.num_calls += 1
        if self.fails:
            self.fails -= 1
            raise self.error("the server is lost")
        return [[-after - before / 100 for before, after in pairwise(one)] for one in sequences]

    def recover(self) -> str:
        self.num_recovered += 1
        return ""

    def close(self) -> None: ...


def worker(*services: Service) -> ScoringWorker:
    context = WorkerContext(group="reference/0", rank=0, num_ranks=1, devices=())
    return ScoringWorker(context, lambda _: services)


def segment(*token_ids: int, parent: int | None = -1) -> Segment:
    return Segment(token_ids=np.asarray(token_ids, np.int32), parent=parent)


def sample(*segments: Segment) -> Sample:
    prompt = Prompt(uid="p", token_ids=np.asarray([1, 2], np.int32), text="", answer="")
    return Sample(key=SampleKey(0, 0), prompt=prompt, segments=segments)


def test_each_token_is_scored_after_the_context_that_it_was_drawn_in() -> None:
    """A tree: a response, two continuations of it, and a context without the prompt."""
    tree = sample(segment(3, 4), segment(5, parent=0), segment(6, 7, parent=0), segment(8, 9, parent=None))
    [found] = worker(Service()).logprobs([tree])
    assert found.tolist() == pytest.approx([-3.02, -4.03, -5.04, -6.04, -7.06, 0.0, -9.08])


def test_results_are_in_the_order_of_the_samples() -> None:
    found = worker(Service()).logprobs([sample(segment(3)), sample(), sample(segment(4, 5))])
    assert [each.tolist() for each in found] == [
        pytest.approx([-3.02]), [], pytest.approx([-4.02, -5.04]),
    ]  # fmt: skip


def test_another_service_scores_if_one_is_lost() -> None:
    lost, other = Service(fails=1), Service()
    [found] = worker(lost, other).logprobs([sample(segment(3))])
    assert found.tolist() == pytest.approx([-3.02]) and (lost.num_recovered, other.num_calls) == (1, 1)


def test_an_input_that_a_service_refuses_is_not_given_to_another() -> None:
    other = Service()
    with pytest.raises(UserError):
        worker(Service(fails=1, error=UserError), other).logprobs([sample(segment(3))])
    assert not other.num_calls


def test_another_service_scores_if_the_disk_of_one_is_full() -> None:
    [found] = worker(Service(fails=1, error=DiskFullError), Service()).logprobs([sample(segment(3))])
    assert found.tolist() == pytest.approx([-3.02])
