"""Logs of a run: metrics, evaluations and samples, kept with its checkpoints and restored from them."""

from collections.abc import Sequence
from pathlib import Path

from interlace.observe import jsonl
from interlace.observe.atomic_file import sync_file, sync_folder, write_atomic
from interlace.observe.jsonl import step_file
from interlace.observe.run_folder import RunFolder


class RunLogs:
    """The files of a run to which each step appends."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._logs = folder.metrics, folder.evaluations

    def copy_to(self, step: int, checkpoint: Path, *, synced: int) -> None:
        """Copies the log up to a step into its checkpoint, and waits until the copy and the samples are on disk.

        A resumed run restores lost lines of its files from the copy. synced: the last step whose samples are already on
        disk.
        """
        for path in self._logs:
            if path.exists():
                (checkpoint / path.name).write_bytes(b"".join(jsonl.lines_until(path, step).values()))
                sync_file(path)
        for path in (step_file(self._folder.samples, number) for number in range(synced + 1, step + 1)):
            if path.exists():
                sync_file(path)
        for folder in (self._folder.samples, self._folder.path):
            sync_folder(folder)

    def return_to(self, step: int, checkpoint: Path | None, *, has_samples: bool = True) -> list[str]:
        """Truncates metrics, evaluations and samples to a step; a resumed run writes the later steps again.

        Suggestions of `interlace advise` are deleted: the resumed run has other steps, and may have other settings.
        checkpoint: of the step; None before the first. Returns a sentence for each loss of data after the checkpoint
        was written. Lost lines of metrics and evaluations are restored from the checkpoint's copy; samples stay lost.
        has_samples: False for a run on given rows, which writes none.
        """
        self._folder.advice.unlink(missing_ok=True)
        told = [sentence for path in self._logs if (sentence := _truncate(path, step, checkpoint))]
        found = {int(path.stem.removeprefix("step_")): path for path in self._folder.samples.glob("step_*.jsonl")}
        for number in [number for number in found if number > step]:
            found.pop(number).unlink()
        written = range(1, step + 1) if has_samples else ()
        lost = [number for number in written if number not in found or jsonl.is_torn(found[number])]
        return (
            [*told, f"{self._folder.samples} has lost samples of {_format_steps(lost)}, which no step trains on again"]
            if lost
            else told
        )


def _truncate(path: Path, step: int, checkpoint: Path | None) -> str | None:
    """Truncates a file of lines to a step; returns a sentence if lines were lost or changed."""
    kept = jsonl.lines_until(path, step)
    copy = jsonl.lines_until(checkpoint / path.name, step) if checkpoint else {}
    lines = kept | copy
    if lines or path.exists():
        write_atomic(path, b"".join(lines[number] for number in sorted(lines)).decode("utf-8"), synced=True)
    lost = [int(number) for number in sorted(copy) if kept.get(number) != copy[number]]
    return f"{path} had lost {_format_steps(lost)}: written anew from {checkpoint}" if lost else None


def _format_steps(numbers: Sequence[int]) -> str:
    """Formats steps as ranges, in words."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ("step " if len(numbers) == 1 else "steps ") + ", ".join("-".join(map(str, each)) for each in ranges)
