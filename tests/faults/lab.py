"""Environment for faults: a folder for each, the command line, and a trained run to damage."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.training import SMALL

REPOSITORY = Path(__file__).parents[2]
CLI = [sys.executable, "-c", "from interlace.cli.main import app; app()"]
LIMIT_S = 240.0
FILE_RECIPE = """
task: {files: {train: data.jsonl}}
model: tiny:micro
reward: exact
steps: 1
prompts_per_step: 1
samples_per_prompt: 2
minibatches: 1
sampling: {max_new_tokens: 4}
rollout: {max_running: 8, max_tokens: 4096}
cluster: {devices: "cpu:1"}
logging: {loggers: []}
"""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One thing that breaks a run, and what is promised for it."""

    name: str
    check: Callable[[Lab], object]
    """Brings it about; raises AssertionError where what follows is not as promised."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A command that ended."""

    code: int
    text: str
    """What it wrote."""

    def refused(self, *sentences: str) -> None:
        """Exit 2 with these words and no traceback."""
        self.said(2, *sentences)

    def said(self, code: int, *sentences: str) -> None:
        assert self.code == code, f"exit {self.code} in place of {code}: {self.text[-600:]}"
        assert "Traceback" not in self.text, self.text[-600:]
        flat = " ".join(self.text.split())
        missing = [sentence for sentence in sentences if sentence not in flat]
        assert not missing, f"{missing} is not in: {flat[-600:]}"

    def passed(self) -> None:
        self.said(0)


@dataclass(frozen=True)
class Lab:
    """A folder of its own for one fault."""

    folder: Path
    shared: Shared

    def cli(self, *arguments: str, text: str | None = None, threads: str | None = None) -> Ended:
        """Runs `interlace` with these arguments to its end."""
        if text is not None:
            (self.folder / "mine.yaml").write_text(text)
        process = self.start(*arguments, threads=threads)
        try:
            output, _ = process.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise AssertionError(f"no end within {LIMIT_S:.0f} s") from None
        return Ended(code=process.returncode, text=output)

    def start(self, *arguments: str, threads: str | None = None) -> subprocess.Popen[str]:
        """Starts `interlace`, stdout and stderr in one pipe. threads: OMP_NUM_THREADS."""
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
        if threads:
            environment["OMP_NUM_THREADS"] = threads
        pipe, both = subprocess.PIPE, subprocess.STDOUT
        return subprocess.Popen(
            [*CLI, *arguments], cwd=self.folder, env=environment, stdout=pipe, stderr=both, text=True
        )

    @property
    def small(self) -> tuple[str, ...]:
        """The quick start's settings at toy size."""
        return *SMALL, f"model.cache_dir={self.shared.cache}"

    def train(self, *arguments: str, threads: str | None = None) -> Ended:
        """The quick start at toy size, as `runs/x`."""
        return self.cli("train", "quickstart", *self.small, "--name", "x", *arguments, threads=threads)

    def train_on(self, content: bytes, *arguments: str) -> Ended:
        """One step on a file of prompts with this content."""
        (self.folder / "data.jsonl").write_bytes(content)
        return self.cli("train", "mine.yaml", "--name", "x", *arguments, text=FILE_RECIPE)

    def resume(self, *arguments: str) -> Ended:
        return self.cli("train", "quickstart", "--name", "x", "--resume", *arguments)

    @property
    def run(self) -> Path:
        """The run's folder: a copy of the trained one, made when it is first asked for."""
        own = self.folder / "runs" / "x"
        if not own.exists():
            shutil.copytree(self.shared.trained(), own)
        return own

    @property
    def newest(self) -> Path:
        """The newest checkpoint of the run, of step 4."""
        return self.run / "checkpoints" / "step_4"

    def steps(self) -> list[int]:
        """Those in metrics.jsonl."""
        lines = (self.run / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["step"] for line in lines]

    def resumes_to(self, steps: int, *sentences: str) -> None:
        """It goes on to its end and says so; its weights and metrics are those of a run that nothing happened to."""
        self.resume(f"steps={steps}").said(0, *sentences)
        assert self.steps() == list(range(1, steps + 1)), self.steps()
        reference = self.shared.reference(steps) / "checkpoints" / f"step_{steps}" / "model.safetensors"
        own = self.run / "checkpoints" / f"step_{steps}" / "model.safetensors"
        assert own.read_bytes() == reference.read_bytes(), "other weights than those of an undisturbed run"


@dataclass
class Shared:
    """What faults share: a run at step 4 with checkpoints 2 and 4, and runs that nothing happened to."""

    root: Path
    _made: dict[int, Path] = field(default_factory=dict)
    _making: threading.Lock = field(default_factory=threading.Lock)

    @property
    def cache(self) -> Path:
        return self.root / "cache"

    def trained(self) -> Path:
        return self.reference(4)

    def reference(self, steps: int) -> Path:
        with self._making:
            if steps not in self._made:
                folder = self.root / f"reference-{steps}"
                folder.mkdir(exist_ok=True)
                recipe = ["checkpoint_every=2", "keep_checkpoints=9", f"steps={steps}"]
                Lab(folder, self).train(*recipe).passed()
                self._made[steps] = folder / "runs" / "x"
            return self._made[steps]


def flip(path: Path) -> None:
    """Changes one bit in the middle."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path, num_bytes: int = 9) -> None:
    """Takes the end off."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """A disk of its own under a folder. Needs the right to mount."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)], check=False)
    assert mounted.returncode == 0, "this user may not mount a small disk: run as root"
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=False)


def each(cases: Sequence[tuple[str, Callable[[Lab], object]]]) -> list[Fault]:
    """cases: (name, check)."""
    return [Fault(name=name, check=check) for name, check in cases]
