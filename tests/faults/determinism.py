"""Determinism and leaks: runs that differ only in irrelevant settings are equal, and a long run does not grow."""

from collections.abc import Callable, Sequence
from pathlib import Path

from tests.faults.lab import Fault, Lab
from tests.support.processes import descendants

WHOLE = ("checkpoint_every=2", "keep_checkpoints=9", "steps=6")


def equals(*pairs: Sequence[str], threads: str | None = None) -> Callable[[Lab], None]:
    """pairs: settings of two runs whose weights are equal to the bit. threads: OMP_NUM_THREADS of the second."""

    def check(lab: Lab) -> None:
        found = []
        for number, settings in enumerate(pairs):
            own = Lab(lab.folder / str(number), lab.shared)
            own.folder.mkdir()
            own.train(*WHOLE, *settings, threads=threads if number else None).passed()
            found.append((own.folder / "runs/x/checkpoints/step_6/model.safetensors").read_bytes())
        assert found[0] == found[1], "other weights"

    return check


def does_not_grow(lab: Lab) -> None:
    """300 steps: memory, open files and threads at step 290 are those of step 30, within a tenth."""
    recipe = ("steps=300", "prompts_per_step=2", "samples_per_prompt=2", "schedule=areal", "reward.workers=2")
    with lab.start("train", "quickstart", "--name", "x", *lab.small, *recipe, "checkpoint_every=0") as process:
        assert process.stdout is not None
        at: dict[int, tuple[int, int, int]] = {}
        for line in process.stdout:
            for step in (30, 290):
                if line.startswith(f"step {step}/"):
                    at[step] = usage(process.pid)
    assert process.returncode == 0
    (early_kb, early_files, early_threads), (late_kb, late_files, late_threads) = at[30], at[290]
    assert late_kb < 1.1 * early_kb, f"{early_kb} -> {late_kb} kB"
    assert late_files <= early_files + 2 and late_threads <= early_threads + 1, at
    left = list(Path("/dev/shm").glob(f"interlace-{process.pid}-*"))
    assert not left, left


def usage(process: int) -> tuple[int, int, int]:
    """Resident kB, open files and threads of a process and all below it."""
    sums = [0, 0, 0]
    for number in descendants(process):
        status = dict(line.split(":", 1) for line in Path(f"/proc/{number}/status").read_text().splitlines())
        sums[0] += int(status["VmRSS"].split()[0])
        sums[1] += len(list(Path(f"/proc/{number}/fd").iterdir()))
        sums[2] += int(status["Threads"])
    return sums[0], sums[1], sums[2]


FAULTS = [
    Fault(name="the same run twice", check=equals((), ())),
    Fault(
        name="OMP_NUM_THREADS is 1",
        check=equals(("cluster.threads_per_worker=1",), ("cluster.threads_per_worker=1",), threads="1"),
    ),
    Fault(name="ray and local", check=equals((), ("cluster.backend=ray",))),
    Fault(name="two ranks, twice", check=equals(("actor.ranks=2",), ("actor.ranks=2",))),
    Fault(name="300 steps under areal with reward processes", check=does_not_grow),
]
