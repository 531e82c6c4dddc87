"""The queue of an engine: order, removal, and the jobs that another engine may take."""

from interlace.core.types import Request, SampleKey, SamplingParams
from interlace.rollouts.engine_jobs import EngineJobs, Job

PARAMS = SamplingParams(max_new_tokens=8)


def job(gid: int, *, tokens: float = 10.0, generated: tuple[int, ...] = ()) -> Job:
    request = Request(
        uid="q", owner=SampleKey(gid, 0), prompt_ids=[1], params=PARAMS, generated_ids=generated,
        generated_logprobs=(0.0,) * len(generated), generated_versions=(0,) * len(generated),
    )  # fmt: skip
    return Job(request=request, order=gid, expected_tokens=tokens, deliver=lambda _: None, max_new_tokens=8)


def filled(*jobs: Job) -> EngineJobs:
    made = EngineJobs()
    for each in jobs:
        made.add(each)
    return made


def test_partials_start_first_then_the_smallest_order() -> None:
    new, early, partial = job(5), job(2), job(9, generated=(4,))
    jobs = filled(new, early, partial)
    assert [jobs.start_first() for _ in range(3) if jobs.first()] == [partial, early, new]
    assert (jobs.num_queued, len(jobs.running), jobs.load.num_requests) == (0, 3, 3)
    assert jobs.end_running(new.request.id) is new and jobs.end_running(new.request.id) is None
    assert (jobs.load.num_requests, jobs.load.live_tokens) == (2, 20.0)


def test_a_request_that_was_removed_and_queued_again_is_taken_once() -> None:
    first, again = job(1), job(1)
    jobs = filled(first)
    assert jobs.remove_queued(first.request.id) is first
    jobs.add(again)
    assert jobs.first() is again
    assert jobs.take_queue() == [again] and jobs.take_queue() == []
    assert (jobs.load.num_requests, jobs.load.live_tokens) == (0, 0.0)


def test_only_new_jobs_are_given_while_the_taker_has_the_smaller_load() -> None:
    partial, others = job(0, generated=(4,)), [job(gid) for gid in range(1, 5)]
    jobs = filled(partial, *others)
    assert jobs.give(most=9, live_tokens=0.0) == others[:2]
    assert jobs.first() is partial and jobs.num_queued == 3
    assert jobs.give(most=0, live_tokens=0.0) == []


def test_the_first_and_the_last_queued_job_are_reported() -> None:
    """The engines with a queue are found by these reports, without a look at thousands of engines."""
    reports: list[bool] = []
    jobs = EngineJobs(lambda: reports.append(jobs.num_queued > 0))
    first, second, third = job(1), job(2), job(3)
    jobs.add(first)
    jobs.add(second)
    assert reports == [True]
    assert jobs.remove_queued("another") is None and reports == [True]
    jobs.start_first()
    jobs.remove_queued(second.request.id)
    assert reports == [True, False]
    jobs.add(third)
    jobs.give(most=1, live_tokens=-100.0)
    assert reports == [True, False, True, False] and jobs.num_queued == 0
    jobs.add(first)
    jobs.take_queue()
    assert reports == [True, False] * 3
