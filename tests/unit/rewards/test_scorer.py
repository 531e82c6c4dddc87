"""Scoring in processes keeps the order, isolates failures, and enforces time limits."""

import asyncio
import importlib.util
import inspect
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.core.types import EMPTY_INT, Prompt, RewardResult, Sample, SampleKey
from interlace.data.columns import to_row
from interlace.data.config import PromptFormat
from interlace.data.formatting import to_prompts
from interlace.data.tables import READERS
from interlace.models.config import ModelConfig
from interlace.models.loading import load_tokenizer
from interlace.rewards.config import RewardConfig
from interlace.rewards.given import name_of
from interlace.rewards.scorer import Scorer
from interlace.runtime.local.own_thread import OwnThread

FUNCTIONS = "tests.support.reward_functions"


def samples(*responses: str, answer: str = "") -> list[Sample]:
    prompt = Prompt(uid="set/0", token_ids=EMPTY_INT, text="q", answer=answer)
    return [Sample(key=SampleKey(0, i), prompt=prompt, text=text) for i, text in enumerate(responses)]


@contextmanager
def scorer(name: str, **settings: float) -> Iterator[Scorer]:
    made = Scorer(RewardConfig.parse({"name": name, **settings}))
    try:
        yield made
    finally:
        made.close()


def scored(made: Scorer, rows: Sequence[Sample]) -> list[RewardResult]:
    return asyncio.run(made.score(rows))


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_results_keep_the_samples_order(workers: int) -> None:
    with scorer(f"{FUNCTIONS}:length", workers=workers) as made:
        results = scored(made, samples(*("x" * (number % 7) for number in range(40))))
        assert [result.reward for result in results] == [float(number % 7) for number in range(40)]
        assert scored(made, []) == []


@pytest.mark.parametrize(
    ("uid", "name"),
    [
        ("train/openai/gsm8k:12", "openai/gsm8k"),
        ("math/heldout/openai/v1.1:12", "openai/v1.1"),
        ("train/saved.d:12", "saved.d"),
        *((f"train/rows.v2{ending}:12", "rows.v2") for ending in READERS),
        ("math/train/rows.jsonl:12", "rows"),
        ("greedy/math/train/rows.jsonl:12", "rows"),
    ],
)
def test_verls_data_source_is_the_name_of_the_data_set(uid: str, name: str) -> None:
    sample = Sample(key=SampleKey(0, 0), prompt=Prompt(uid=uid, token_ids=EMPTY_INT, text="q", answer=name), text="")
    with scorer(f"{FUNCTIONS}:is_from_answer", workers=0) as made:
        assert scored(made, [sample])[0].parts == {"accuracy": 1.0}


def without_line(failure: str | None) -> str | None:
    """Removes the place of the user's line, which must be in the file of the functions."""
    return None if failure is None else re.sub(r" \(\w*reward\w*\.py:\d+, in \w+\)$", "", failure)


def test_a_failure_names_the_line_of_the_function_that_raised() -> None:
    with scorer(f"{FUNCTIONS}:moody", workers=0) as made:
        [result] = scored(made, samples("raise"))
    file, line, name = re.fullmatch(
        r"KeyError: 'no such thing' \((.+):(\d+), in (\w+)\)", result.failure or ""
    ).groups()  # type: ignore[union-attr]
    path = Path(str(inspect.getsourcefile(importlib.import_module(FUNCTIONS))))
    assert (file, name) == (path.name, "moody")
    assert "no such thing" in path.read_text(encoding="utf-8").splitlines()[int(line) - 1]


def test_one_bad_sample_fails_alone() -> None:
    with scorer(f"{FUNCTIONS}:moody", timeout_s=0.5) as made:
        results = scored(made, samples("a", "hang", "b", "raise", "exit", "c"))
        assert [result.reward for result in results if result.failure is None] == [1.0, 1.0, 1.0]
        assert [without_line(result.failure) for result in results] == [
            None,
            "timed out after 0.5 s",
            None,
            "KeyError: 'no such thing'",
            "the reward function ended its process (exit code 3)",
            None,
        ]
        assert scored(made, samples("again"))[0].reward == 1.0


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_exits_fails_its_sample_and_not_the_run(workers: int) -> None:
    """As code of a response does, where the function runs it."""
    with scorer(f"{FUNCTIONS}:moody", workers=workers) as made:
        results = scored(made, samples("a", "quit", "b"))
    assert [without_line(result.failure) for result in results] == [None, "SystemExit: 4", None]


def test_a_sigterm_to_all_processes_of_a_run_costs_it_no_score(tmp_path: Path) -> None:
    with scorer(f"{FUNCTIONS}:stopped", workers=2) as made:
        results = scored(made, samples(*[str(tmp_path / "first")] * 8))
    assert [(result.reward, result.failure) for result in results] == [(1.0, None)] * 8


def test_a_sigterm_between_two_steps_costs_no_score_either() -> None:
    with scorer(f"{FUNCTIONS}:process", workers=2) as made:
        ended = {int(result.parts["pid"]) for result in scored(made, samples(*"abcdefgh"))}
        for process in ended:
            os.kill(process, signal.SIGTERM)
        [again] = scored(made, samples("a"))
    assert again.failure is None and int(again.parts["pid"]) not in ended


@pytest.mark.parametrize("workers", [0, 1])
def test_a_reason_is_text_that_a_file_takes_whatever_was_raised(workers: int) -> None:
    with scorer(f"{FUNCTIONS}:moody", workers=workers) as made:
        results = scored(made, samples("half", "mute", "b"))
    assert [without_line(result.failure) for result in results] == [
        r"ValueError: half \ud83d of a character",
        "MuteError: its message raised RuntimeError",
        None,
    ]


def test_an_async_function_is_awaited_so_many_at_once_as_it_has_workers() -> None:
    with scorer(f"{FUNCTIONS}:judged", workers=4) as made:
        results = scored(made, samples("a", "bb", "raise", "a", "bbb"))
    assert [result.reward for result in results] == [1.0, 2.0, 0.0, 1.0, 3.0]
    assert [without_line(result.failure) for result in results if result.failure] == ["KeyError: 'no such thing'"]
    with scorer(f"{FUNCTIONS}:judged", workers=3, timeout_s=0.2) as made:
        assert {result.failure for result in scored(made, samples("a", "b", "c"))} == {"timed out after 0.2 s"}


def test_an_async_function_that_blocks_or_will_not_be_cancelled_fails_its_sample_alone() -> None:
    rows = samples("a", "block", "b", "swallow", "c", "ctrl-c", "block deeper", "d")
    with scorer(f"{FUNCTIONS}:moody_judge", workers=8, timeout_s=1.5) as made:
        failures = [result.failure or "" for result in scored(made, rows)]
        assert scored(made, samples("again"))[0].failure is None
    assert [bool(failure) for failure in failures] == [False, True, False, True, False, True, True, False], failures
    assert failures[1].startswith("timed out after 1.5 s: it blocked its event loop, at ")
    assert "reward_functions.py" in failures[1] and "in moody_judge" in failures[1]
    assert failures[3] == failures[6] == "timed out after 1.5 s"
    assert without_line(failures[5]) == "KeyboardInterrupt: "


def test_the_call_whose_limit_ends_first_is_not_blamed_for_a_loop_that_another_call_blocks() -> None:
    async def score_apart(made: Scorer) -> list[RewardResult]:
        first = asyncio.create_task(made.score(samples("slow")))
        await asyncio.sleep(0.1)
        return [*await made.score(samples("block later")), *await first]

    with scorer(f"{FUNCTIONS}:moody_judge", workers=8, timeout_s=1.0) as made:
        assert scored(made, samples("a"))[0].failure is None  # the process runs
        blocking, slow = asyncio.run(score_apart(made))
    assert blocking.failure == "timed out after 1 s" and slow.failure is None


def test_an_async_function_that_ends_its_process_fails_its_sample_alone() -> None:
    with scorer(f"{FUNCTIONS}:moody_judge", workers=4, timeout_s=5) as made:
        failures = [result.failure for result in scored(made, samples("a", "exit", "b", "c"))]
    assert failures == [None, "the reward function ended its process (exit code 3)", None, None]


@pytest.mark.parametrize("stuck", ["hang", "sleep"])
def test_without_processes_a_limit_holds_too(stuck: str) -> None:
    with scorer(f"{FUNCTIONS}:moody", workers=0, timeout_s=0.4) as made:
        results = scored(made, samples("a", stuck, "b", stuck, "c"))
    assert [without_line(result.failure) for result in results] == [
        None,
        "timed out after 0.4 s",
        None,
        "timed out after 0.4 s",
        None,
    ]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_function_that_raises_what_ctrl_c_raises_fails_its_sample(workers: int) -> None:
    with scorer(f"{FUNCTIONS}:moody", workers=workers) as made:
        results = scored(made, samples("a", "ctrl-c", "b"))
    assert [without_line(result.failure) for result in results] == [None, "KeyboardInterrupt: ", None]


def test_a_process_that_is_killed_while_it_is_idle_is_started_again() -> None:
    with scorer(f"{FUNCTIONS}:process", workers=2) as made:
        for _ in range(3):
            killed = {int(result.parts["pid"]) for result in scored(made, samples(*"abcdefgh"))}
            for process in killed:
                os.kill(process, signal.SIGKILL)
            results = scored(made, samples(*"abcd"))
            assert all(result.failure is None and int(result.parts["pid"]) not in killed for result in results)


def test_a_limit_holds_for_each_sample_and_not_for_the_wait_before_it() -> None:
    with scorer(f"{FUNCTIONS}:moody", timeout_s=0.4) as made:
        results = scored(made, samples("hang", "hang", "hang", "fine"))
        assert [result.failure is None for result in results] == [False, False, False, True]


def test_a_number_that_cannot_be_computed_does_not_hang_the_run() -> None:
    """What a model may well write: math-verify would evaluate it for hours."""
    with scorer("math_verify", timeout_s=3.0) as made:
        tower, right = scored(made, samples(r"\boxed{9^{9^{9^9}}}", r"\boxed{3}", answer="3"))
        assert tower.failure == "timed out after 3 s"
        assert right.reward == 5.0


def test_a_worker_is_small_and_has_no_torch() -> None:
    import torch  # this process has it, so a worker that shared its modules would too

    assert torch is not None
    with scorer(f"{FUNCTIONS}:process") as made:
        (result,) = scored(made, samples("x"))
    assert result.parts["torch"] == 0.0
    assert result.parts["pid"] != os.getpid()
    assert result.parts["mebibytes"] < 150


def test_closing_ends_what_still_runs() -> None:
    async def abandon(made: Scorer) -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(made.score(samples("hang")), timeout=0.5)

    start = time.monotonic()
    with scorer(f"{FUNCTIONS}:moody", timeout_s=600) as made:
        asyncio.run(abandon(made))
    made.close()
    assert time.monotonic() - start < 60


def test_a_tiny_sample_costs_little() -> None:
    """A process boundary costs well under a millisecond a sample, so that samples need not be put together."""
    with scorer("exact") as made:
        scored(made, samples("warm"))
        start = time.perf_counter()
        scored(made, samples(*["4"] * 512, answer="4"))
        assert (time.perf_counter() - start) / 512 < 5e-3  # measured 0.1-0.2 ms; the limit allows for a busy machine


def test_a_reward_that_is_not_there_is_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match="unknown reward 'exakt'"):
        Scorer(RewardConfig(name="exakt"))
    with pytest.raises(UserError, match="cannot import 'no_such_module'"):
        Scorer(RewardConfig(name="no_such_module:function"))


def test_a_process_ends_with_a_run_that_was_killed_whatever_it_does() -> None:
    script = (
        "import asyncio, threading; from tests.unit.rewards.test_scorer import FUNCTIONS, samples, scored, scorer\n"
        f"with scorer('{FUNCTIONS}:endless', workers=1, timeout_s=1000) as made: scored(made, samples('a'))"
    )
    run = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert run.stdout
    worker = os.pidfd_open(int(run.stdout.readline()))
    run.kill()
    run.wait()
    run.stdout.close()
    ended, _, _ = select.select([worker], [], [], 15)
    if not ended:
        signal.pidfd_send_signal(worker, signal.SIGKILL)
    os.close(worker)
    assert ended, "it outlived its run"


def test_calls_that_wait_share_a_trip_to_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    submit, trips = OwnThread.submit, list[object]()

    def counted(thread: OwnThread, function: Callable[[], object]) -> Future[object]:
        trips.append(function)
        return submit(thread, function)

    monkeypatch.setattr(OwnThread, "submit", counted)

    async def at_once(made: Scorer) -> list[list[RewardResult]]:
        return await asyncio.gather(*(made.score(samples("x" * number)) for number in range(40)))

    with scorer(f"{FUNCTIONS}:length", workers=0) as made:
        results = asyncio.run(at_once(made))
    assert [result.reward for [result] in results] == [float(number) for number in range(40)]
    assert len(trips) == 1


def test_a_quick_result_does_not_wait_for_a_slow_one_of_the_same_trip() -> None:
    async def both(made: Scorer) -> tuple[bool, list[RewardResult]]:
        quick, slow = (asyncio.ensure_future(made.score(samples(text))) for text in ("a", "hang"))
        await quick
        return slow.done(), await slow

    with scorer(f"{FUNCTIONS}:moody", workers=0, timeout_s=0.5) as made:
        was_done, [result] = asyncio.run(both(made))
    assert not was_done and result.failure == "timed out after 0.5 s"


def test_a_batch_is_scored_by_one_call() -> None:
    with scorer(f"{FUNCTIONS}:ranked") as made:
        results = scored(made, samples("aaa", "b", "cc"))
    assert [result.reward for result in results] == [2.0, 0.0, 1.0]


def test_a_column_of_messages_beside_a_text_is_not_the_prompt() -> None:
    """Rows such as those of NuminaMath have the whole solved conversation beside `problem`."""
    chat = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
    row = to_row({"prompt": "1+1?", "answer": "2", "messages": chat}, {}, (), uid="u", origin="set:1")
    [prompt] = to_prompts([row], ["1+1?"], PromptFormat(), load_tokenizer(ModelConfig(path="tiny:micro-chat")))
    seen: list[object] = []

    def judge(prompts: list[object], completions: list[object], messages: list[object]) -> list[float]:
        seen.extend([*prompts, *completions, *messages])
        return [1.0] * len(completions)

    with scorer(name_of(judge)) as made:
        scored(made, [Sample(key=SampleKey(0, 0), prompt=prompt, text="two")])
    assert seen == ["1+1?", "two", chat]


async def judged_here(response: str, answer: str) -> float:
    await asyncio.sleep(0.01)
    if response == "hang":
        await asyncio.sleep(60)
    if response == "block":
        time.sleep(2)
    return float(len(response))


def test_an_async_function_of_this_program_is_awaited_in_this_process() -> None:
    with scorer(name_of(judged_of_this_program()), timeout_s=0.3) as made:
        results = scored(made, samples("a", "hang", "ccc"))
        assert [without_line(result.failure) for result in results] == [None, "timed out after 0.3 s", None]
        assert [result.reward for result in results] == [1.0, 0.0, 3.0]
        [blocked] = scored(made, samples("block"))
        assert "blocked its event loop" in (blocked.failure or "")
        assert scored(made, samples("bb"))[0].reward == 2.0


def test_a_function_of_a_file_outside_of_the_path_is_scored_in_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """verl and others load a reward by the path of its file; a scoring process could not import such a module."""
    (tmp_path / "reward_of_a_file.py").write_text("def judge(response):\n    return 2.0\n")
    spec = importlib.util.spec_from_file_location("reward_of_a_file", tmp_path / "reward_of_a_file.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "reward_of_a_file", module)
    spec.loader.exec_module(module)
    with scorer(name_of(module.judge)) as made:
        assert scored(made, samples("a"))[0].reward == 2.0
    monkeypatch.syspath_prepend(str(tmp_path))
    assert name_of(module.judge) == "reward_of_a_file:judge"


def judged_of_this_program() -> Callable[..., object]:
    async def judge(response: str) -> float:
        return await judged_here(response, "")

    return judge


def test_several_rewards_are_added_up_with_their_weights() -> None:
    config = RewardConfig.model_validate(["exact", {"name": f"{FUNCTIONS}:length", "weight": 0.5}])
    made = Scorer(config)
    try:
        results = scored(made, samples("four", "4", answer="4"))
    finally:
        made.close()
    assert [result.reward for result in results] == [2.0, 1.5]
    assert results[1].parts == {"exact": 1.0, "length": 0.5}


def test_memory_of_a_scoring_process_is_limited() -> None:
    with scorer(f"{FUNCTIONS}:hungry", scoring_memory_mib=64) as made:
        results = scored(made, samples("200", "1"))
    assert results[0].failure is not None and results[0].failure.startswith("MemoryError")
    assert results[1].reward == 1.0
