"""Kills and signals: no process remains, the reason is reported, and the run resumes from its checkpoint."""

import json
import os
import signal
import subprocess
from collections.abc import Callable

from interlace.run.chaos.real import role_processes
from tests.faults.lab import Ended, Fault, Lab
from tests.support.processes import all_gone, descendants, handles, named, running

LONG = ("steps=400", "checkpoint_every=2", "keep_checkpoints=500")
Kill = Callable[[subprocess.Popen[str]], None]


def disturbed(lab: Lab, at: str, kill: Kill, *settings: str) -> Ended:
    """Trains until a line begins with `at`, kills, and waits for the end; no process may be left."""
    with lab.start("train", "quickstart", "--name", "x", *lab.small, *LONG, *settings) as process:
        assert process.stdout is not None
        head = ""
        while not (line := process.stdout.readline()).startswith(at):
            assert line, f"the run ended by itself: {head[-600:]}"
            head += line
        of = handles(descendants(process.pid))
        kill(process)
        rest = process.communicate(timeout=120)[0]
    gone = all_gone(of, within_s=15)
    for handle in of:
        os.close(handle)
    assert gone, "a process is left 15 s after the end"
    return Ended(code=process.returncode, text=head + rest)


def last_step(lab: Lab) -> int:
    return len((lab.folder / "runs/x/metrics.jsonl").read_text().splitlines())


def goes_on_as_if_nothing_had_been(lab: Lab, *settings: str) -> None:
    """Two steps beyond the newest checkpoint, with the weights of a run that nothing happened to."""
    newest = max(int(path.name.removeprefix("step_")) for path in lab.folder.glob("runs/x/checkpoints/step_*"))
    steps = newest + 2
    lab.resume(f"steps={steps}").passed()
    other = Lab(lab.folder / "other", lab.shared)
    other.folder.mkdir()
    other.train(*LONG, *settings, f"steps={steps}").passed()
    weights = [(own.folder / f"runs/x/checkpoints/step_{steps}/model.safetensors").read_bytes() for own in (lab, other)]
    assert weights[0] == weights[1], "other weights than those of an undisturbed run"


def stop_at(process: subprocess.Popen[str], at: str, message: str) -> None:
    """Stops a run once a line begins with `at`. message: of the failure if the run ends before."""
    assert process.stdout is not None
    while not (line := process.stdout.readline()).startswith(at):
        assert line, message
    process.send_signal(signal.SIGINT)


def by(sent: signal.Signals, find: Callable[[int], int] = lambda driver: driver) -> Kill:
    return lambda process: os.kill(find(process.pid), sent)


def driver_dies(at: str, *settings: str) -> Callable[[Lab], None]:
    def check(lab: Lab) -> None:
        disturbed(lab, at, by(signal.SIGKILL), *settings)
        goes_on_as_if_nothing_had_been(lab, *settings)

    return check


def driver_dies_with_stale_samples(preset: str, at: str, bound: int) -> Callable[[Lab], None]:
    """Races decide what such a run trains on, so its promise is the bound, and that it ends."""

    def check(lab: Lab) -> None:
        disturbed(lab, at, by(signal.SIGKILL), f"schedule={preset}")
        steps = last_step(lab) + 3
        lab.resume(f"steps={steps}").passed()
        rows = [json.loads(line) for line in (lab.folder / "runs/x/metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == list(range(1, steps + 1))
        stalest = max(row["sched/staleness_max"] for row in rows)
        assert stalest <= bound, f"staleness {stalest} of at most {bound}"

    return check


def rank_dies(
    find: Callable[[int], int], settings: tuple[str, ...], *sentences: str, sent: signal.Signals = signal.SIGKILL
) -> Callable[[Lab], None]:
    """The same command continues with further steps, after it reported which process died. sent: to the process."""

    def kill(process: subprocess.Popen[str]) -> None:
        os.kill(find(process.pid), sent)
        assert process.stdout is not None
        text, num_steps = "", 0
        while num_steps < 4:
            line = process.stdout.readline()
            assert line, f"the run ended: {text[-600:]}"
            if line.startswith("step "):
                num_steps += all(sentence in " ".join(text.split()) for sentence in (*sentences, "again"))
            else:
                text += line
        process.send_signal(signal.SIGINT)

    def check(lab: Lab) -> None:
        disturbed(lab, "step 4/", kill, *settings).said(0, "Stopped after step")
        goes_on_as_if_nothing_had_been(lab, *settings)

    return check


def control_store_dies(lab: Lab) -> None:
    """Ray decides whether the run continues or ends; nothing may hang or be lost. A run that continues is stopped."""

    def kill(process: subprocess.Popen[str]) -> None:
        os.kill(ray("gcs_server")(process.pid), signal.SIGKILL)
        assert process.stdout is not None
        while (line := process.stdout.readline()) and not line.startswith("step 8/"):
            pass
        if line:
            process.send_signal(signal.SIGINT)

    ended = disturbed(lab, "step 4/", kill, "cluster.backend=ray")
    assert ended.code in {0, 1} and "Traceback" not in ended.text, ended.text[-600:]
    goes_on_as_if_nothing_had_been(lab, "cluster.backend=ray")


def asked_to_end(sent: signal.Signals, times: int, *settings: str) -> Callable[[Lab], None]:
    def ask(process: subprocess.Popen[str]) -> None:
        process.send_signal(sent)
        if times > 1:
            assert process.stdout is not None
            while "Stopping at the end of this step" not in (line := process.stdout.readline()):
                assert line, "the run did not say that it stops"
            process.send_signal(sent)

    def check(lab: Lab) -> None:
        ended = disturbed(lab, "step 4/", ask, *settings)
        assert "Traceback" not in ended.text, ended.text[-600:]
        # The second signal may come when the step has ended anyway.
        assert ended.code == 0 or (times > 1 and ended.code == 1), ended.text[-600:]
        goes_on_as_if_nothing_had_been(lab, *settings)

    return check


def idle_reward_process_dies(lab: Lab) -> None:
    def kill(process: subprocess.Popen[str]) -> None:
        for scorer in running(process.pid, "interlace.rewards.process")[1:]:
            os.kill(scorer, signal.SIGKILL)
        stop_at(process, "step 8/", "the run ended with the reward's process")

    disturbed(lab, "step 4/", kill, "reward.workers=2").said(0, "Stopped after step")


def fork_server_is_stopped(lab: Lab) -> None:
    """Another fork server starts the process in place of a dead one."""

    def stop(process: subprocess.Popen[str]) -> None:
        server, scorer, *_ = running(process.pid, "interlace.rewards.process")
        os.kill(server, signal.SIGSTOP)
        os.kill(scorer, signal.SIGKILL)
        stop_at(process, "step 8/", "the run ended with the fork server")

    disturbed(lab, "step 4/", stop, "reward.workers=2").said(0, "Stopped after step")


def ray(name: str, number: int = 0) -> Callable[[int], int]:
    return lambda driver: named(driver, name)[number]


ON_RAY = ("cluster.backend=ray",)
TWO_RANKS = ("actor.ranks=2",)
FAULTS = [
    *(
        Fault(name=f"kill -9 of a synchronous run at {at.rstrip('/')}", check=driver_dies(at))
        for at in ("step 4/", "step 5/", "step 6/", "step 7/")
    ),
    *(
        Fault(name=f"kill -9 under {preset} at {at.rstrip('/')}", check=driver_dies_with_stale_samples(preset, at, k))
        for preset, k in (("areal", 4), ("pipelinerl", 4), ("verl-fully-async-d", 1))
        for at in ("step 4/", "step 7/")
    ),
    Fault(name="kill -9 of a run on ray", check=driver_dies("step 4/", *ON_RAY)),
    *(
        Fault(
            name=f"kill -9 of rank process {number} on ray",
            check=rank_dies(ray("ray::RankActor", number), (*ON_RAY, "reward.workers=0"), "died while it"),
        )
        for number in range(4)
    ),
    Fault(name="kill -9 of the raylet", check=rank_dies(ray("raylet"), ON_RAY, "raylet (process", "is gone")),
    Fault(name="kill -9 of ray's control store", check=control_store_dies),
    Fault(
        name="kill -9 of one of two local ranks",
        check=rank_dies(lambda driver: role_processes("actor", driver)[-1], TWO_RANKS, "died while it"),
    ),
    Fault(
        name="SIGSTOP of a rank process on ray",
        check=rank_dies(
            ray("ray::RankActor"), ON_RAY, "was killed, because a signal had stopped it", sent=signal.SIGSTOP
        ),
    ),
    Fault(name="SIGINT once", check=asked_to_end(signal.SIGINT, 1)),
    Fault(name="SIGINT twice", check=asked_to_end(signal.SIGINT, 2)),
    Fault(name="SIGTERM twice", check=asked_to_end(signal.SIGTERM, 2)),
    Fault(name="SIGTERM once, on ray", check=asked_to_end(signal.SIGTERM, 1, *ON_RAY)),
    Fault(name="kill -9 of reward processes that are idle", check=idle_reward_process_dies),
    Fault(name="SIGSTOP of the fork server of rewards", check=fork_server_is_stopped),
]
