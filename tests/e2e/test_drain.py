"""A program's request to an engine that drains for new weights waits, or is refused and retried."""

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from interlace.agents.server.metrics import ServerMetrics
from interlace.core.types import JSON, Sample
from interlace.rollouts.driver import EngineDriver
from interlace.rollouts.generate import GenerateStage
from interlace.weights.ref import WeightRef
from tests.support.training import metrics, run_recipe

openai = pytest.importorskip("openai")
pytest.importorskip("aiohttp")
PROMPTS = 2
"""Prompts of a step."""
STEP_OF: dict[str, int] = {}
"""Step in which a row is trained."""
NEWEST = [0]
"""Version that engines were given last."""
PUBLISHED = threading.Condition()


def asks_until_weights_change(row: Mapping[str, JSON], base_url: str, api_key: str) -> float:
    """A script that knows nothing of training, with the client as it comes."""
    is_over, num_answers = False, 0
    with openai.OpenAI(base_url=base_url, api_key=api_key) as client:
        while not is_over:
            with PUBLISHED:
                is_over = PUBLISHED.wait_for(lambda: NEWEST[0] >= STEP_OF[str(row["uid"])], 0.02)
            client.chat.completions.create(model="any", messages=row["messages"], max_tokens=100)
            num_answers += 1
    return float(num_answers)


@pytest.mark.slow
@pytest.mark.parametrize("patience_s", [0.0, 30.0])
def test_a_script_gets_through_whether_its_requests_wait_or_are_turned_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, patience_s: float
) -> None:
    statuses: list[int] = []
    observe, generate, update = ServerMetrics.observe, GenerateStage.generate, EngineDriver.update_weights

    def observed(self: ServerMetrics, route: str, status: int, seconds: float) -> None:
        statuses.append(status)
        observe(self, route, status, seconds)

    def generated(self: GenerateStage, samples: Sequence[Sample]) -> None:
        STEP_OF.update((sample.prompt.uid, sample.key.gid // PROMPTS) for sample in samples)
        generate(self, samples)

    def updated(self: EngineDriver, ref: WeightRef) -> None:
        update(self, ref)
        with PUBLISHED:
            NEWEST[0] = ref.version
            PUBLISHED.notify_all()

    monkeypatch.setattr(ServerMetrics, "observe", observed)
    monkeypatch.setattr(GenerateStage, "generate", generated)
    monkeypatch.setattr(EngineDriver, "update_weights", updated)
    settings = [
        "steps=4", f"prompts_per_step={PROMPTS}", "samples_per_prompt=2", "minibatches=1", "warmup=null",
        "task.reasoning_gym.train_size=32", "task.reasoning_gym.heldout_size=4", "logging.loggers=[]", "eval_every=0",
        "schedule=one-step-off", "cluster.devices=cpu:2", "algorithm.drop_zero_variance=false",
        f"episode.drain_patience_s={patience_s}", f"episode.function={__name__}:asks_until_weights_change",
        "episode.max_turns=1000", "episode.shown_tools=[]",
    ]  # fmt: skip
    for run in range(1 if patience_s else 5):  # a request may miss the drain of every publication of a run
        NEWEST[0] = 0
        assert run_recipe("program", tmp_path, f"drain-{run}", settings).done_steps == 4
        lines = metrics(tmp_path, f"drain-{run}")
        assert all(line["samples/trained"] == 4 and not line["samples/failed"] for line in lines)
        if 503 in statuses:
            break
    assert set(statuses) == ({200, 503} if patience_s == 0 else {200})
