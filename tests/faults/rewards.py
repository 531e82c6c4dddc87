"""Rewards: a faulty reward function affects only the sample that it scores, and a run can always be ended."""

import json
import signal
import time
from collections.abc import Callable

from tests.faults.lab import Fault, Lab

SMALL = (
    "steps=2", "prompts_per_step=4", "samples_per_prompt=4", "minibatches=1", "warmup=null",
    "task.reasoning_gym.train_size=16", "task.reasoning_gym.heldout_size=0", "algorithm.drop_zero_variance=false",
    "algorithm.refill_rounds=0", "cluster.devices=cpu:1", "logging.loggers=[]", "reward.tag=null",
    "reward.answer_format=text", "reward.timeout_s=1", "cluster.hang_after_s=60", "recovery.redraws=0",
)  # fmt: skip


def settings(function: str, workers: int) -> tuple[str, ...]:
    return *SMALL, f"reward.name=tests.support.faulty_rewards:{function}", f"reward.workers={workers}"


def costs_its_sample_alone(function: str, workers: int, reason: str) -> Callable[[Lab], None]:
    """reason: in what each failed sample says; "" where none fails."""

    def check(lab: Lab) -> None:
        lab.cli("train", "quickstart", "--name", "x", *settings(function, workers)).passed()
        files = sorted((lab.folder / "runs" / "x" / "samples").glob("step_*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        failed = [str(row["reason"]) for row in rows if row["event"] == "failed"]
        assert len(failed) < len(rows), "all samples failed"
        assert bool(failed) == bool(reason), failed[:3]
        others = [why for why in failed if reason not in why]
        assert not others, others[:3]

    return check


def is_refused(function: str, reason: str) -> Callable[[Lab], None]:
    """The trial on the first row's answer finds a value of a wrong type before a model is loaded."""

    def check(lab: Lab) -> None:
        lab.cli("train", "quickstart", "--name", "x", *settings(function, 2)).said(2, reason)

    return check


def fails_every_sample(lab: Lab) -> None:
    lab.cli("train", "quickstart", "--name", "x", *settings("always_raises", 2)).said(1, "ZeroDivisionError")


def exits_within_the_run(lab: Lab) -> None:
    """With no process of its own a reward that ends its process ends the run; the documents say so."""
    ended = lab.cli("train", "quickstart", "--name", "x", *settings("exits", 0))
    assert ended.code == 7, ended.text[-600:]


def ends_a_call(sent: signal.Signals) -> Callable[[Lab], None]:
    def check(lab: Lab) -> None:
        heldout = "task.reasoning_gym.heldout_size=8", "reward.timeout_s=1000"
        with lab.start("train", "quickstart", "--name", "x", *settings("hangs", 2), *heldout) as process:
            assert process.stdout is not None
            while "reward runs trial" not in (line := process.stdout.readline()):  # the first call
                assert line, "the run ended by itself"
            process.send_signal(sent)
            start_s = time.monotonic()
            rest = process.stdout.read()
            took_s = time.monotonic() - start_s
        assert took_s < 10, f"{took_s:.0f} s"
        assert process.returncode == 1, rest
        assert "stopped before there was anything to save" in rest and "Traceback" not in rest, rest

    return check


FAILS = [
    ("raises", 2, "ZeroDivisionError"),
    ("raises", 0, "ZeroDivisionError"),
    ("raises_ctrl_c", 2, "KeyboardInterrupt"),
    ("raises_ctrl_c", 0, "KeyboardInterrupt"),
    ("recurses", 2, "RecursionError"),
    ("gives_nan", 2, "no finite float32"),
    ("gives_infinity", 2, "no finite float32"),
    ("gives_too_much", 2, "no finite float32"),
    ("exits", 2, "ended its process (exit code 7)"),
    ("crashes", 2, "ended its process (exit code -11)"),
    ("asks", 2, "EOFError"),
    ("hangs", 2, "timed out after 1 s"),
    ("hangs", 0, "timed out after 1 s"),
    ("never_returns", 8, "timed out after 1 s"),
    ("never_returns", 0, "timed out after 1 s"),
    ("blocks", 8, "blocked its event loop"),
    ("swallows", 8, "timed out after 1 s"),
]
WRONG_TYPES = [
    ("gives_a_word", "is not a number"),
    ("gives_none", "returned None"),
    ("gives_a_list", "is not a number"),
    ("gives_text", "is not a number"),
]
PASSES = ["prints", "names_parts_at_length", "names_fifty_parts", "leaves_a_thread", "takes_another_order"]

FAULTS = [
    *(
        Fault(name=f"{function}, {workers} processes", check=costs_its_sample_alone(function, workers, reason))
        for function, workers, reason in FAILS
    ),
    *(Fault(name=function, check=costs_its_sample_alone(function, 2, "")) for function in PASSES),
    *(Fault(name=function, check=is_refused(function, reason)) for function, reason in WRONG_TYPES),
    Fault(name="every sample fails", check=fails_every_sample),
    Fault(name="exits, with no process of its own", check=exits_within_the_run),
    *(
        Fault(name=f"{sent.name} while a call hangs", check=ends_a_call(sent))
        for sent in (signal.SIGINT, signal.SIGTERM)
    ),
]
