"""Storage: damaged, missing and full files, and files written by two runs."""

import json
import pickle
import shutil
import signal
from pathlib import Path

from tests.faults.lab import Ended, Fault, Lab, cut, each, flip, small_disk
from tests.faults.security import Payload

WEIGHTS, MOMENTS, ASIDE = "model.safetensors", "optimizer/rank-0-of-1.safetensors", "set aside as damaged-step_4"


def damaged_metadata(lab: Lab) -> None:
    """A payload where the format of torch.distributed.checkpoint has its pickle."""
    mark = lab.folder / "ran"
    (lab.newest / "optimizer" / ".metadata").write_bytes(pickle.dumps(Payload(mark)))
    lab.resume("steps=6").refused("format of an earlier version")
    assert not mark.exists()


def metrics_lost(lab: Lab, keep: int, *, torn: bool) -> None:
    path = lab.run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:keep]) + (lines[keep][:30] if torn else ""))
    lab.resumes_to(6, "metrics.jsonl had lost step")


def middle_line_lost(lab: Lab) -> None:
    path = lab.run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:1], *lines[2:]]))
    lab.resumes_to(6, "metrics.jsonl had lost step 2")


def samples_lost(lab: Lab) -> None:
    (lab.run / "samples" / "step_000003.jsonl").unlink()
    lab.resumes_to(6, "has lost samples of step 3")


def none_is_whole(lab: Lab) -> None:
    flip(lab.newest / WEIGHTS)
    flip(lab.run / "checkpoints" / "step_2" / WEIGHTS)
    ended = lab.resume("steps=6")
    ended.refused("has no whole checkpoint to go on from", "step_4 has", "step_2 has")
    assert "To continue from" not in ended.text, "it advises the command that has just failed"
    assert lab.steps() == [1, 2, 3, 4]


def full_at_a_checkpoint(lab: Lab) -> None:
    with small_disk(lab.folder / "runs", "3M"):
        lab.train("steps=4", "checkpoint_every=1", "keep_checkpoints=9").refused("no space", "--resume")


def full_at_a_publication(lab: Lab) -> None:
    """The disk of the versions has room for the first ones."""
    folder = lab.folder / "versions"
    with small_disk(folder, "1M"):
        settings = ("warmup=null", "checkpoint_every=1", "weights.transport=folder", f"weights.folder={folder}")
        lab.train("steps=4", *settings).refused(str(folder), "Make room", "weights.folder")


def full_at_a_line(lab: Lab) -> None:
    with small_disk(lab.folder / "runs", "120k"):
        lab.train("steps=40", "checkpoint_every=0").refused("is full", "Make room")


def two_at_once(lab: Lab, *arguments: str) -> list[Ended]:
    processes = [lab.start("train", "quickstart", "--name", "x", *arguments) for _ in range(2)]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    return [Ended(code=process.returncode, text=text) for process, text in zip(processes, outputs, strict=True)]


def two_starts(lab: Lab) -> None:
    from tests.support.training import SMALL

    ended = two_at_once(lab, *SMALL, f"model.cache_dir={lab.shared.cache}")
    assert sorted(each.code for each in ended) == [0, 2], [each.text[-300:] for each in ended]
    next(each for each in ended if each.code).refused("exists already")


def two_resumes(lab: Lab) -> None:
    assert lab.newest.is_dir()
    ended = two_at_once(lab, "--resume", "steps=6")
    assert sorted(each.code for each in ended) == [0, 2], [each.text[-300:] for each in ended]
    next(each for each in ended if each.code).refused("is being trained by process")
    assert lab.steps() == [1, 2, 3, 4, 5, 6]


def overwritten_while_trained(lab: Lab) -> None:
    trained = lab.start("train", "quickstart", "--name", "x", "--resume", "steps=500") if lab.newest else None
    assert trained and trained.stdout
    try:
        next(line for line in trained.stdout if line.startswith("step 5/"))
        lab.train("--overwrite").refused("is being trained by process")
    finally:
        trained.send_signal(signal.SIGKILL)
        trained.communicate()
    assert lab.newest.is_dir()


def state_is_lost(lab: Lab) -> None:
    (lab.newest / "state.json").unlink()
    lab.resumes_to(6, "lacks state.json", ASIDE)


def half_written(lab: Lab) -> None:
    unfinished = lab.run / "checkpoints" / ".tmp-step_6"
    shutil.copytree(lab.newest, unfinished)
    cut(unfinished / WEIGHTS)
    lab.resumes_to(6)
    assert not unfinished.exists()


def checkpoint_of_another_run(lab: Lab) -> None:
    from interlace.observe.checkpoints import MANIFEST

    path = lab.newest / MANIFEST
    content = json.loads(path.read_text())
    content["identity"]["run"] = "0" * 32
    path.write_text(json.dumps(content))
    lab.resume("steps=6").refused("belongs to another run")


def renamed_to_a_later_step(lab: Lab) -> None:
    lab.newest.rename(lab.newest.with_name("step_9"))
    lab.resume("steps=12").refused("was written at step 4 and renamed")


def config_edited(lab: Lab) -> None:
    path = lab.run / "config.yaml"
    path.write_text(path.read_text().replace("samples_per_prompt: ", "samples_per_prompt: 2"))
    lab.resume("steps=6").refused("samples_per_prompt: ", "not allowed", "steps: 4 -> 6 (allowed)")


def no_checkpoint(lab: Lab) -> None:
    shutil.rmtree(lab.run / "checkpoints")
    lab.resumes_to(4)


def damage(name: str, path: str, *, whole: bool = False) -> Fault:
    """whole: the file goes; otherwise a bit of it flips."""

    def check(lab: Lab) -> None:
        found: Path = lab.newest / path
        if whole:
            shutil.rmtree(found) if found.is_dir() else found.unlink()
        else:
            flip(found)
        lab.resumes_to(6, ASIDE, "resuming after step 2")

    return Fault(name=name, check=check)


def truncated(path: str) -> Fault:
    def check(lab: Lab) -> None:
        cut(lab.newest / path)
        lab.resumes_to(6, ASIDE, "resuming after step 2")

    return Fault(name=f"{path} truncated", check=check)


FAULTS = [
    *(truncated(path) for path in ("state.json", WEIGHTS, MOMENTS, "manifest.json", "metrics.jsonl")),
    *(damage(f"one bit of {path} flipped", path) for path in (WEIGHTS, MOMENTS, "config.json", "state.json")),
    damage("optimizer/ gone", "optimizer", whole=True),
    damage("tokenizer gone", "tokenizer.json", whole=True),
    *each(
        [
            ("state.json gone", state_is_lost),
            ("a pickle that runs as optimizer/.metadata", damaged_metadata),
            ("no checkpoint is whole", none_is_whole),
            ("no checkpoint at all", no_checkpoint),
            ("a checkpoint of another run", checkpoint_of_another_run),
            ("a checkpoint renamed to a later step", renamed_to_a_later_step),
            ("config.yaml edited before a resume", config_edited),
            ("a checkpoint half written", half_written),
            ("last line of metrics torn", lambda lab: metrics_lost(lab, 3, torn=True)),
            ("last two lines of metrics lost", lambda lab: metrics_lost(lab, 2, torn=False)),
            ("a line in the middle of metrics lost", middle_line_lost),
            ("samples of a step lost", samples_lost),
            ("disk full at a checkpoint", full_at_a_checkpoint),
            ("disk full at a publication", full_at_a_publication),
            ("disk full at a line", full_at_a_line),
            ("two starts of one name", two_starts),
            ("two resumes of one run", two_resumes),
            ("--overwrite of a run that trains", overwritten_while_trained),
        ],
    ),
]
