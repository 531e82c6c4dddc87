"""With damaged files, --resume continues from intact ones, reports this, and executes nothing that it reads."""

import contextlib
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from interlace.core.errors import InterlaceError, UserError
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.observe.checkpoints import write_manifest
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from tests.support.training import equal_weights, final_weights, metrics, run

WEIGHTS, MOMENTS = "model.safetensors", "optimizer/rank-0-of-1.safetensors"
RECIPE = ["checkpoint_every=2", "keep_checkpoints=5"]
Damage = Callable[[Path], object]


class Notes(QuietProgress):
    """Keeps what is said."""

    def __init__(self) -> None:
        self.said = ""

    def say(self, text: str) -> None:
        self.said += text + "\n"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run at step 4 with checkpoints 2 and 4, and one of six steps to compare with."""
    root = tmp_path_factory.mktemp("trained")
    run(root, "four", [*RECIPE, "steps=4"])
    run(root, "six", [*RECIPE, "steps=6"])
    return root


@pytest.fixture
def root(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "four", tmp_path / "four")
    return tmp_path


def resume(root: Path) -> str:
    notes = Notes()
    run(root, "four", [*RECIPE, "steps=6"], resume=True, progress=notes)
    return notes.said


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def is_as_undisturbed(root: Path, trained: Path) -> bool:
    same_weights = equal_weights(final_weights(root, "four"), final_weights(trained, "six"))
    return same_weights and metrics(root, "four") == metrics(trained, "six")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda step: flip(step / WEIGHTS), f"other content than was written in {WEIGHTS}"),
        (lambda step: cut(step / MOMENTS), f"{MOMENTS} with"),
        (lambda step: shutil.rmtree(step / "optimizer"), f"lacks {MOMENTS}"),
        (lambda step: (step / "manifest.json").unlink(), "has no manifest.json"),
    ],
)
def test_the_newest_whole_checkpoint_is_gone_on_from(root: Path, trained: Path, damage: Damage, said: str) -> None:
    damage(root / "four" / "checkpoints" / "step_4")
    heard = resume(root)
    assert f"step_4 {said}" in heard or said in heard
    assert "set aside as damaged-step_4" in heard and "resuming after step 2" in heard
    assert is_as_undisturbed(root, trained)


def test_a_run_without_a_whole_checkpoint_says_so_and_stays_as_it_is(root: Path) -> None:
    checkpoints = root / "four" / "checkpoints"
    flip(checkpoints / "step_2" / WEIGHTS)
    cut(checkpoints / "step_4" / WEIGHTS)
    before = (root / "four" / "metrics.jsonl").read_bytes()
    with pytest.raises(UserError, match=r"no whole checkpoint.*step_4 has .*step_2 has .*without --resume"):
        resume(root)
    assert (root / "four" / "metrics.jsonl").read_bytes() == before
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step_2", "step_4"]


@pytest.mark.parametrize(("kept", "lost"), [((), "steps 1-4"), ((0, 1), "steps 3-4"), ((0, 3), "steps 2-3")])
def test_lost_lines_of_metrics_are_written_anew(root: Path, trained: Path, kept: tuple[int, ...], lost: str) -> None:
    path = root / "four" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[number] for number in kept) + lines[2][:20])
    assert f"metrics.jsonl had lost {lost}: written anew" in resume(root)
    assert is_as_undisturbed(root, trained)


def test_lost_samples_are_said(root: Path) -> None:
    samples = RunFolder(path=root / "four").samples
    (samples / "step_000002.jsonl").unlink()
    cut(samples / "step_000003.jsonl")
    assert "has lost samples of steps 2-3" in resume(root)


class Payload:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(Payload.mark),)

    mark = Path()


def resume_with_payload(root: Path, planted: str, copy: Path) -> None:
    """In a copy of the run: the file is a pickle that runs, and the manifest is right, as an attacker would have it."""
    Payload.mark = root / "ran"
    shutil.copytree(root / "four", copy / "four")
    step = copy / "four" / "checkpoints" / "step_4"
    (copy / "four" / planted).parent.mkdir(exist_ok=True)
    (copy / "four" / planted).write_bytes(pickle.dumps(Payload()))
    if (step / "manifest.json").read_bytes()[:1] == b"{":
        write_manifest(step)
    with contextlib.suppress(InterlaceError, ValueError):
        run(copy, "four", [*RECIPE, "steps=5"], resume=True)
    assert not Payload.mark.exists(), f"{planted} ran"


STEP = "checkpoints/step_4"


@pytest.mark.parametrize("planted", [f"{STEP}/optimizer/.metadata", f"{STEP}/{MOMENTS}", f"{STEP}/{WEIGHTS}"])
def test_a_payload_in_a_checkpoint_does_not_run(root: Path, planted: str) -> None:
    resume_with_payload(root, planted, root / "copy")


@pytest.mark.slow
def test_a_payload_in_any_file_does_not_run(root: Path) -> None:
    """Also under names that other formats are read by."""
    files = [path for path in (root / "four").rglob("*") if path.is_file()]
    names = [path.relative_to(root / "four").as_posix() for path in files]
    others = ["optimizer/__0_0.distcp", "pytorch_model.bin", "adapter/adapter_model.bin", "training_args.bin"]
    assert len(names) > 15
    for planted in [*names, *(f"{STEP}/{name}" for name in others)]:
        resume_with_payload(root, planted, root / "copy")
        shutil.rmtree(root / "copy")


def test_a_planted_model_cannot_run(root: Path, tmp_path: Path) -> None:
    """The weights of a checkpoint as a pickle, as torch.save writes them; and code that its config.json asks for."""
    Payload.mark = tmp_path / "ran"
    step = root / "four" / "checkpoints" / "step_4"
    (step / WEIGHTS).unlink()
    torch.save({"model.embed_tokens.weight": Payload()}, step / "pytorch_model.bin")
    with pytest.raises(InterlaceError):
        load_model(ModelConfig(path=str(step)))
    (step / "evil.py").write_text(f"import os; os.mkdir({str(Payload.mark)!r})")
    config = json.loads((step / "config.json").read_text())
    remote = {"AutoConfig": "evil.C", "AutoModelForCausalLM": "evil.M", "AutoTokenizer": ["evil.T", "evil.T"]}
    (step / "config.json").write_text(json.dumps({**config, "model_type": "unheard-of", "auto_map": remote}))
    with pytest.raises(InterlaceError):
        load_model(ModelConfig(path=str(step)))
    assert not Payload.mark.exists()
