"""A mixture that a program gives draws the prompts of the same mixture in a recipe, and a callback changes it."""

import json
from collections import Counter
from pathlib import Path

import pytest

import interlace
from interlace.core.errors import UserError
from interlace.run.callbacks import Callback
from interlace.run.library import Settings
from tests.support.library import TINY
from tests.support.reward_functions import size
from tests.support.training import samples

SOURCES = {name: [{"prompt": f"{name}{number}", "answer": ""} for number in range(60)] for name in ("sums", "words")}
RECIPE = """
model: tiny:micro
task: [{source: sums.jsonl, weight: 3}, {source: words.jsonl, weight: 1}]
reward: tests.support.reward_functions:size
steps: 2
prompts_per_step: 32
samples_per_prompt: 2
sampling: {max_new_tokens: 4}
cluster: {devices: "cpu:2"}
rollout: {max_running: 8, max_tokens: 512}
"""
SETTINGS: Settings = {**TINY, "prompts_per_step": 32}


def count_sources(prompts: list[str]) -> Counter[str]:
    return Counter(prompt.rstrip("0123456789") for prompt in prompts)


def test_a_mixture_of_rows_and_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, rows in SOURCES.items():
        Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    Path("mixed.yaml").write_text(RECIPE)

    def swap(step: interlace.StepInfo) -> None:
        with pytest.raises(UserError, match=r"no source 'text'\. Its sources are: sums, words"):
            step.set_weights({"text": 1})
        step.set_weights({"sums": 0})

    def train(name: str, *callbacks: Callback) -> list[str]:
        """Returns the prompts of all samples."""
        mixture = {"sums": (SOURCES["sums"], 3), "words": ("words.jsonl", 1)}
        interlace.train(
            model="tiny:micro", data=mixture, reward=size, name=name, quiet=True, callbacks=callbacks, **SETTINGS
        )
        return [str(row["prompt"]) for row in samples(tmp_path / "runs", name)]

    interlace.train("mixed.yaml", name="recipe", quiet=True)
    program = train("program")
    assert program == [row["prompt"] for row in samples(tmp_path / "runs", "recipe")]
    assert count_sources(program) == {"sums": 96, "words": 32}
    swapped = train("swapped", swap)
    assert swapped[:64] == program[:64]
    assert count_sources(swapped[64:]) == {"words": 64}


@pytest.mark.parametrize("shaped", list(SOURCES))
def test_a_length_reward_is_of_its_source_alone(tmp_path: Path, shaped: str) -> None:
    def reward_of(name: str) -> dict[str, object]:
        shaping = {"length_weight": 1.0} if name == shaped else {}
        return {"name": "tests.support.reward_functions:size", "workers": 0, "shaping": shaping}

    mixture = {name: {"source": rows, "weight": 1, "reward": reward_of(name)} for name, rows in SOURCES.items()}
    own: Settings = {**SETTINGS, "steps": 1}
    interlace.train(model="tiny:micro", data=mixture, name="own", folder=tmp_path, quiet=True, **own)
    rows = samples(tmp_path, "own")
    drawn, compared = (
        count_sources([str(row["prompt"]) for row in kind]) for kind in (rows, [row for row in rows if "scored" in row])
    )
    assert set(drawn) == set(SOURCES) and compared == {shaped: drawn[shaped]}
