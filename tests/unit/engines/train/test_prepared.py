"""A minibatch that is laid out during another's computation gives identical results, visible in the timeline."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from interlace.core.types import Sample
from interlace.engines.train import TrainEngine, make_supervised_sample, sft_loss
from interlace.engines.train.config import OptimizerConfig, TrainConfig
from interlace.models.tiny import build_tiny
from tests.support.training import equal_weights, run_recipe


def samples(number: int) -> list[Sample]:
    draw = np.random.default_rng(number)
    return [make_supervised_sample(draw.integers(2, 99, 12), draw.integers(2, 99, 9)) for _ in range(6)]


def made_engine() -> TrainEngine:
    config = TrainConfig(tokens_per_microbatch=50)
    return TrainEngine(build_tiny("micro", 0)[0], loss=sft_loss, optimizer=OptimizerConfig(lr=1e-3), config=config)


def weights_after(minibatches: Sequence[list[Sample]], *, prepares: bool) -> dict[str, torch.Tensor]:
    engine = made_engine()
    for samples_ahead in minibatches[:1] if prepares else ():
        engine.prepare(samples_ahead)
    for place, one in enumerate(minibatches):
        if prepares:
            for samples_ahead in minibatches[place + 1 : place + 2]:
                engine.prepare(samples_ahead)
            engine.accumulate_prepared()
        else:
            engine.accumulate(one)
        engine.optimizer_step()
    return {name: tensor.clone() for name, tensor in engine.weights().items()}


def test_what_was_prepared_trains_to_the_same_bits() -> None:
    minibatches = [samples(0), [], samples(1), samples(2)]
    assert equal_weights(weights_after(minibatches, prepares=True), weights_after(minibatches, prepares=False))


def test_a_dropped_rest_of_a_step_drops_what_was_prepared_of_it() -> None:
    engine, other = made_engine(), made_engine()
    engine.prepare(samples(0))
    engine._stopped = True  # as after a minibatch that was too far out
    engine.accumulate_prepared()
    engine.end_step()
    for one in (engine, other):
        one.prepare(samples(1))
        one.accumulate_prepared()
        one.optimizer_step()
    assert equal_weights(dict(engine.weights()), dict(other.weights()))


def test_a_run_lays_the_next_minibatch_out_while_one_is_computed(tmp_path: Path) -> None:
    settings = [
        "steps=2", "prompts_per_step=4", "samples_per_prompt=2", "minibatches=2", "epochs=2", "warmup=null",
        "task.reasoning_gym.train_size=16", "task.reasoning_gym.heldout_size=0", "algorithm.drop_zero_variance=false",
        "logging.loggers=[]", "cluster.threads_per_worker=1", f"model.cache_dir={tmp_path / 'cache'}",
    ]  # fmt: skip
    run_recipe("quickstart", tmp_path, "run", settings)
    found = json.loads((tmp_path / "run" / "timeline.json").read_text())
    events = [event for event in found if "dur" in event]
    laid_out, computed, updated = (
        list({event["ts"]: event for event in events if event["name"] == f"actor.{name}"}.values())
        for name in ("prepare", "accumulate", "optimizer_step")
    )
    assert (len(laid_out), len(computed)) == (4, 8), "the second of two minibatches, in each pass of each step"
    for event in laid_out:
        meanwhile = min((one for one in computed if one["ts"] + one["dur"] > event["ts"]), key=lambda one: one["ts"])
        assert not any(event["ts"] < one["ts"] < meanwhile["ts"] for one in updated), "laid out before it was computed"
        assert any(one["ts"] > event["ts"] for one in updated)
