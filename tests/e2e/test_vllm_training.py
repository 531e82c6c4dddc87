"""Training on vLLM works under the schedules that vLLM supports; run by `make test-vllm`."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.core.types import JSON
from interlace.models.config import ModelConfig
from interlace.models.loading import load_model
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.schedule.presets import load_schedule, preset_names
from tests.support.engine_servers import serve_vllm
from tests.support.ledgers import check_books
from tests.support.training import run

pytestmark = pytest.mark.vllm

MODEL = "tiny:mini"
ON_VLLM = ["rollout.engine=vllm", f"model={MODEL}", "cluster.devices=cpu:2", "rollout.max_running=16"]
STARTED = ("verl-colocated", "one-step-off", "areal")
"""Presets whose runs start their own servers: in turns with training, beside it in lock step, and without steps."""
SYNCHRONOUS = [name for name in preset_names() if load_schedule(name).max_staleness == 0]
PRESETS = sorted({*SYNCHRONOUS, *STARTED, "pipelinerl", "kimi-partial-rollout"})


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The warmed-up model is made once."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def servers(root: Path) -> Iterator[str]:
    """The setting of two running servers. They start once, because a start takes longer than a run."""
    loaded = load_model(ModelConfig(path=MODEL))
    loaded.model.save_pretrained(root / "model")
    loaded.tokenizer.save_pretrained(root / "model")
    flags = ("--dtype", "float32", "--enforce-eager", "--max-num-seqs", "16", "--kv-cache-memory-bytes", str(1 << 26))
    with ExitStack() as stack:
        urls = [
            stack.enter_context(serve_vllm(root / "model", root / f"server-{number}.log", *flags))
            for number in range(2)
        ]
        yield f"rollout={{engine: address, dialect: vllm, urls: [{', '.join(urls)}], max_running: 16}}"


def train(root: Path, name: str, *settings: str) -> list[Mapping[str, JSON]]:
    report = run(root, name, settings)
    check_books(root / name, report)
    return [json.loads(line) for line in (root / name / "metrics.jsonl").read_text().splitlines()]


def check_preset(rows: Sequence[Mapping[str, JSON]], preset: str) -> None:
    """Checks the number of steps, the staleness bound, and the log-probs of a schedule without staleness."""
    assert len(rows) == 3
    schedule = load_schedule(preset)
    assert max(row["sched/staleness_max"] for row in rows) <= schedule.staleness_bound  # type: ignore[type-var]
    if schedule.max_staleness == 0 and schedule.sync_every == 1:  # each step samples and trains with the same weights
        assert all(row["actor/logprob_gap"] < 1e-5 for row in rows)  # type: ignore[operator]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_preset_trains_on_servers_at_addresses(root: Path, servers: str, preset: str) -> None:
    settings = (f"model={MODEL}", "cluster.devices=cpu:2", f"schedule={preset}", "steps=3", "minibatches=1")
    check_preset(train(root, f"{preset}-at", servers, *settings), preset)


@pytest.mark.parametrize("preset", STARTED)
def test_a_preset_trains_on_servers_that_it_starts(root: Path, preset: str) -> None:
    check_preset(train(root, preset, *ON_VLLM, f"schedule={preset}", "steps=3", "minibatches=1"), preset)


def test_the_engine_serves_each_version_that_was_trained(root: Path) -> None:
    """A learning rate at which an engine that kept any old weights would show in the log-probs."""
    rows = train(root, "fast", *ON_VLLM, "steps=4", "minibatches=1", "optimizer={lr: 3e-2}")
    assert all(row["actor/logprob_gap"] < 1e-5 for row in rows), rows  # type: ignore[operator]


def test_a_schedule_that_it_cannot_keep_is_refused() -> None:
    with pytest.raises(UserError, match=r"'vllm' cannot do this: .*kv_on_switch=offload"):
        check_recipe(load_recipe("quickstart", [*ON_VLLM, "schedule=async-colocated"]))


def test_heads_that_it_lacks_on_a_cpu_are_refused_before_the_start() -> None:
    with pytest.raises(UserError, match=r"attention heads have 16 numbers, .* rollout.engine=native"):
        check_recipe(load_recipe("quickstart", [*ON_VLLM, "model=tiny:micro"]))


def test_a_gpu_is_not_asked_of_a_build_for_cores() -> None:
    from interlace.engines.rollout.kinds import create_kind

    kind = create_kind(load_recipe("quickstart", ON_VLLM).rollout)
    assert kind.absence("cpu") is None
    assert "build for CPU cores, and the run's devices are GPUs" in str(kind.absence("cuda"))
