"""The examples run as their first lines state, and the code in the documents runs too."""

import ast
import asyncio
import json
import re
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from interlace.cli.main import app
from interlace.run.clusters.base import run_flow
from interlace.run.recipe.load import load_recipe
from interlace.runtime.channel import Channel
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import Worker, operation

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "places",
    [
        pytest.param(("all", "all"), id="in turns", marks=pytest.mark.slow),
        pytest.param(("0-50%", "50-100%"), id="side by side"),
    ],
)
def test_proposer_and_judge_both_learn(places: tuple[str, str]) -> None:
    command = [sys.executable, str(EXAMPLES / "proposer_judge.py"), *places]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    found = re.findall(r"step \d+: ([\d.]+) right at a mean gap of ([\d.]+)", result.stdout)
    shares, gaps = [float(share) for share, _ in found], [float(gap) for _, gap in found]
    assert len(found) == 3
    assert shares[-1] > 0.9 and shares[-1] > shares[0], "the judge tells what an untrained one guesses at"
    assert gaps[-1] < 0.15, "the proposer found what is hard: drawn evenly, gaps are 0.31 apart"


def test_pictures_go_straight_from_worker_to_worker() -> None:
    command = [sys.executable, str(EXAMPLES / "straight_through.py")]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.stdout == "mean grey 9.5 of 20 pictures\n", result.stderr


def test_the_flow_is_as_short_as_it_says() -> None:
    assert len((EXAMPLES / "proposer_judge.py").read_text(encoding="utf-8").splitlines()) < 80


def blocks() -> list[str]:
    """What docs/extending.md shows of Python."""
    text = (EXAMPLES.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


class Comparer(Worker):
    @operation(bin="inference")
    def act(self, pairs: list[tuple[int, int]]) -> list[bool]:
        return [first > second for first, second in pairs]


@dataclass(frozen=True)
class Pair:
    key: int
    pairs: tuple[int, int]
    judged: bool | None = None


def test_the_stage_that_is_spelled_out_runs() -> None:
    names: dict[str, Callable[..., Coroutine[None, None, None]]] = {}
    exec(next(block for block in blocks() if "async def judged" in block), names)

    async def flow(cluster: Cluster) -> list[bool | None]:
        judge = await cluster.start("judge", Comparer, on="all")
        channel = Channel[int, Pair]("pairs", Pair, cluster.waits)
        for key in range(20):
            channel.open(key, Pair(key, (key, 10)), ["key", "pairs"])
        channel.close()
        cluster.spawn(names["judged"](channel, judge), name="judge")
        return [row.judged async for _, row in channel.subscribe("reader", ["judged"]).rows()]

    assert asyncio.run(run_flow(flow, devices="cpu:1")) == [key > 10 for key in range(20)]


def test_the_reward_tells_right_from_wrong_as_the_command_runs_it() -> None:
    names: dict[str, Callable[[str, str, str, dict[str, str]], dict[str, float]]] = {}
    exec(next(block for block in blocks() if "def short_and_right" in block), names)
    document = (EXAMPLES.parent / "docs" / "extending.md").read_text(encoding="utf-8")
    command = re.search(r"interlace train (\w+) (.*rewards:short_and_right.*)", document)
    assert command is not None
    reward = load_recipe(command[1], command[2].split()).reward
    assert reward.workers == 1 and reward.tag is None, "in a process of its own, and shown the whole response"
    right, wrong = (
        sum(names["short_and_right"]("40>", f"<answer>{digits}</answer>", "['4.0', '0.0']", {}).values())
        for digits in ("40", "04")
    )
    assert right >= reward.correct > wrong


def test_every_block_of_python_is_python() -> None:
    assert len([ast.parse(block) for block in blocks()]) >= 5


def test_an_engine_of_ones_own_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["rollout=own_engine:Plain", "steps=2", "prompts_per_step=4", "samples_per_prompt=2", "minibatches=1"]
    settings += [
        "warmup.steps=2",
        "warmup.until=null",
        "sampling.max_new_tokens=6",
        "evaluation.num_prompts=2",
        "reward.workers=0",
    ]
    settings += ["algorithm.drop_zero_variance=false", f"model.cache_dir={tmp_path}"]
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    result = CliRunner().invoke(app, ["train", "quickstart", *settings, "--name", "own"])
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (tmp_path / "runs/own/metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and all(row["actor/logprob_gap"] < 1e-4 for row in rows), rows


def test_that_engine_is_as_short_as_the_documents_say() -> None:
    code = ast.parse((EXAMPLES / "own_engine.py").read_text(encoding="utf-8"))
    classes = [node for node in code.body if isinstance(node, ast.ClassDef)]
    lines = ast.unparse(ast.Module(body=list(classes), type_ignores=[])).splitlines()
    assert len([line for line in lines if line.strip()]) < 25
