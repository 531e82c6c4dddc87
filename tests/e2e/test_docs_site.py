"""The documentation site builds in strict mode, and the recipes of its tutorials pass the check of recipes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from interlace.models.tiny import build_tiny
from interlace.run.clusters import local
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from tests.e2e.test_published_recipes import CONFIGS, GIB

ROOT = Path(__file__).parents[2]
MKDOCS = ROOT / ".venv-docs" / "bin" / "mkdocs"
TUTORIALS = ROOT / "docs" / "tutorials"


@pytest.mark.skipif(not MKDOCS.exists(), reason="MkDocs is in an environment of its own: make docs")
def test_the_site_builds_without_a_broken_link_and_can_be_searched(tmp_path: Path) -> None:
    command = [str(MKDOCS), "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "excluded from the built site" not in done.stderr, "a link to such a file is broken"
    assert (tmp_path / "search" / "search_index.json").stat().st_size > 100_000
    for page in ("failures", "tutorials/two-nodes", "reference/settings"):
        assert (tmp_path / page / "index.html").exists()
    assert (tmp_path / "source/examples/own_engine.py.txt").exists()


@pytest.mark.parametrize(
    ("page", "config", "gpus", "changes"),
    [
        ("lora-one-gpu", "qwen2.5-1.5b-grpo", (24 * GIB,), []),
        ("eight-gpus", "qwen2.5-7b-grpo", (80 * GIB,) * 8, ["rollout=native"]),  # vLLM is in another environment
    ],
)
def test_the_recipe_of_a_tutorial_passes_the_check_and_fits(
    page: str, config: str, gpus: tuple[int, ...], changes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the published configuration of the model and a small tokenizer, because tests download nothing."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "_gpu_bytes", lambda: gpus)
    [text] = re.findall(r"```yaml\n(.*?)```", (TUTORIALS / f"{page}.md").read_text(encoding="utf-8"), re.DOTALL)
    question = '{"prompt": "1 + 1", "answer": "2"}\n'
    (tmp_path / "questions.jsonl").write_text("".join(question.replace("1 +", f"{n} +") for n in range(200)))
    (tmp_path / "recipe.yaml").write_text(text)
    model, _ = CONFIGS[config]
    model.architectures = ["Qwen2ForCausalLM"]
    for part in (model, build_tiny("micro", 0)[1]):
        part.save_pretrained(tmp_path / "model")
    derived = check_recipe(load_recipe("recipe.yaml", ["model.path=model", *changes]))
    assert derived.num_heldout_prompts == 2
    assert max(worker.peak_bytes for worker in derived.memory) < gpus[0]


@pytest.mark.slow
def test_the_commands_of_sft_then_grpo_run(tmp_path: Path) -> None:
    """Unmodified, except for fewer steps."""
    text = (TUTORIALS / "sft-then-grpo.md").read_text(encoding="utf-8")
    [block] = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    shorter = re.sub(r"steps=\d+", "steps=2", block).replace("step_60", "step_2")
    for line in shorter.splitlines():
        command = [sys.executable, "-c", "from interlace.cli.main import app; app()", *line.split()[1:]]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "runs/second/report.html").exists()
