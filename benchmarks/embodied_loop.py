"""A robot's whole loop: concurrent simulators, policy and training, against the same work in lock step in one process.

- `batches`: turns per second of the policy's engine, 64 requests in dynamic batches against one after another.
- `loop`: simulated steps per second of the recipe `robot`, against a plain loop in this process: all environments act,
  then all are stepped, then the policy and its critic are trained on the result, with the same engines. Seconds of wall
  clock; both use all available cores.
- `waves`: the loop with 64 concurrent environments against 32 at a time.

Ratios compare neighbours in time; lowest and highest are over the rounds.

    python benchmarks/embodied_loop.py [--only batches loop waves] [--rounds 3] [--write docs/robots.md] [--json x.json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from _page import write_table

from interlace.algorithms import create_algorithm
from interlace.core.types import (
    NO_GROUP,
    PROMPT,
    Prompt,
    Request,
    Response,
    Sample,
    SampleGroup,
    SampleKey,
    SamplingParams,
    Segment,
)
from interlace.engines.rollout import NativeConfig, NativeEngine
from interlace.engines.train import CriticEngine, TrainEngine, critic_model
from interlace.engines.train.config import CriticConfig, TrainConfig
from interlace.models.action_tokens import action_tokens
from interlace.models.loading import load_model
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.robots.envs.load import create_envs
from interlace.robots.episodes.robot import RobotConfig
from interlace.robots.features import StateFeatures
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train

BEGIN, END = "<!-- benchmarks/embodied_loop.py -->", "<!-- end of loop -->"
TARGETS = {"dynamic batches against one at a time": "4 times", "whole loop against lock step": "1.6 times"}
SKIPPED = 1
"""First steps of a run that are not measured."""


def recipe_of(*overrides: str) -> Recipe:
    """Returns the recipe `robot` without warm-up and evaluation, which do not affect the measurement."""
    return load_recipe("robot", ["warmup=null", "task.starts.heldout_size=0", "logging.loggers=[]", *overrides])


class Policy:
    """The recipe's policy in an engine of this process."""

    def __init__(self, recipe: Recipe) -> None:
        loaded = load_model(recipe.model)
        actions = action_tokens(loaded.model.config)
        assert actions is not None and isinstance(recipe.episode, RobotConfig)
        self.model, self.actions, self.episode = loaded.model, actions, recipe.episode
        self.words = loaded.tokenizer("reach the goal")["input_ids"]
        self.engine = NativeEngine(
            load_model(recipe.model).model, config=NativeConfig(max_running=128, max_tokens=8192)
        )
        self.params = SamplingParams(max_new_tokens=actions.num_tokens)
        self.features = StateFeatures(recipe.episode.features)
        self._turn = 0

    def requests(self, states: np.ndarray) -> list[Request]:
        """Returns a request for each state, [n, 39]."""
        self._turn += 1
        context = [*self.words, *self.actions.placeholders]
        return [
            Request(
                uid="bench", owner=SampleKey(NO_GROUP, index), turn=self._turn, prompt_ids=context,
                params=self.params, query_ids=self.actions.query_ids,
                inputs={"state": self.features.of(state)[None]},
            )
            for index, state in enumerate(states)
        ]  # fmt: skip

    def answer(self, requests: Sequence[Request]) -> list[Response]:
        """Serves requests concurrently."""
        done: dict[int, Response] = {}
        for one in requests:
            self.engine.submit(one)
        while len(done) < len(requests):
            done |= {one.request.owner.index: one for one in self.engine.step().finished}
        return [done[index] for index in sorted(done)]


def batches(rounds: int) -> list[float]:
    """Measures dynamic batches."""
    policy, ratios = Policy(recipe_of()), []
    states = np.random.default_rng(0).normal(size=(64, 39)).astype(np.float32)
    for _ in range(rounds):
        alone = seconds(lambda: [policy.answer([one]) for one in policy.requests(states)])
        ratios.append(alone / seconds(lambda: policy.answer(policy.requests(states))))
    return ratios


def seconds(work: Callable[[], object]) -> float:
    """Returns the wall-clock seconds of a call."""
    began_s = time.perf_counter()
    work()
    return time.perf_counter() - began_s


class LockStep:
    """The plain loop."""

    def __init__(self, recipe: Recipe) -> None:
        torch.set_num_threads(2)
        self.policy, self.recipe = Policy(recipe), recipe
        self.num = recipe.prompts_per_step
        env = self.policy.episode.env
        self.envs = create_envs(env.family, env.settings, self.num)
        self.algorithm = create_algorithm(recipe.algorithm.name, recipe.algorithm.settings.model_dump())
        self.actor = TrainEngine(
            self.policy.model, loss=self.algorithm.loss, optimizer=recipe.optimizer, config=TrainConfig()
        )
        self.critic = CriticEngine(critic_model(self.policy.model), config=CriticConfig())

    def step(self, number: int) -> int:
        """Runs an episode in each environment and trains once. Returns the simulated steps."""
        count = self.num
        starts = [number * count + place for place in range(count)]
        observed = self.envs.reset(seeds=[0] * count, task_ids=[0] * count, init_state_ids=starts)
        turns: list[list[Response]] = [[] for _ in range(count)]
        alive, reward, done = list(range(count)), np.zeros(count), 0
        while alive:
            answers = self.policy.answer(self.policy.requests(observed["state"]))
            chosen = np.stack([self.policy.actions.decode(answer.token_ids) for answer in answers])
            result = self.envs.chunk_step(chosen, alive)
            done += int(result.valid.sum()) * 2
            for row, slot in enumerate(alive):
                turns[slot].append(answers[row])
                reward[slot] = float(result.success[row])
            keep = [row for row in range(len(alive)) if not result.ended[row]]
            alive = [alive[row] for row in keep]
            observed = {name: array[keep] for name, array in result.observation.items()}
        self._train([self._sample(slot, own, reward[slot]) for slot, own in enumerate(turns)])
        return done

    def _sample(self, slot: int, turns: Sequence[Response], reward: float) -> Sample:
        segments: list[Segment] = []
        ids, queries = (
            np.asarray(each, np.int32) for each in (self.policy.actions.placeholders, self.policy.actions.query_ids)
        )
        for turn in turns:
            segments.append(
                Segment(parent=PROMPT, token_ids=ids, sampled=np.zeros(len(ids), np.bool_), inputs=turn.request.inputs,
                        logprobs=np.zeros(len(ids), np.float32))
            )  # fmt: skip
            segments.append(
                Segment(
                    parent=len(segments) - 1, token_ids=np.asarray(turn.token_ids, np.int32), query_ids=queries,
                    logprobs=np.asarray(turn.logprobs, np.float32),
                )
            )  # fmt: skip
        prompt = Prompt(uid="bench", token_ids=np.asarray(self.policy.words, np.int32), text="", answer="")
        return Sample(key=SampleKey(slot, 0), prompt=prompt, segments=tuple(segments), reward=reward)

    def _train(self, samples: list[Sample]) -> None:
        values = self.critic.values(samples)
        samples = [replace(sample, values=own) for sample, own in zip(samples, values, strict=True)]
        ready = []
        for sample in samples:
            found = self.algorithm.advantages(SampleGroup(gid=0, step=0, samples=(sample,)))
            assert found.returns is not None
            ready.append(replace(sample, advantages=found.advantages[0], returns=found.returns[0]))
        whole = self.algorithm.batch_advantages(ready)
        ready = [replace(sample, advantages=own) for sample, own in zip(ready, whole, strict=True)]
        size = len(ready) // self.recipe.minibatches
        for first in range(0, len(ready), size):
            for engine in (self.actor, self.critic):
                engine.accumulate(ready[first : first + size])
                engine.optimizer_step()
        weights = {name: tensor.clone() for name, tensor in self.actor.weights().items()}
        self.policy.engine.update_weights(weights, 1, "keep")


def lock_step_rate(steps: int) -> float:
    """Returns the simulated steps per second of the plain loop."""
    loop = LockStep(recipe_of())
    loop.step(0)
    began_s, done = time.perf_counter(), 0
    for number in range(1, steps + 1):
        done += loop.step(number)
    return done / (time.perf_counter() - began_s)


def loop_rate(steps: int, *overrides: str) -> float:
    """Returns the simulated steps per second of the recipe."""
    recipe = recipe_of(f"steps={steps + SKIPPED}", "logging.timeline=false", *overrides)
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(Path(root), "run")
        folder.write_config(recipe)
        train(recipe, folder, resume=False, progress=QuietProgress(), stop=StopSignal(lambda: None))
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()][SKIPPED:]
    return sum(line["env/steps"] for line in lines) / sum(line["timing_s/step"] for line in lines)


def measure(only: Sequence[str], rounds: int, steps: int) -> list[tuple[str, list[float], str]]:
    """Returns name, ratios of each round, and a note."""
    found: list[tuple[str, list[float], str]] = []
    if "batches" in only:
        found.append(("dynamic batches against one at a time", batches(rounds), "64 turns, one engine"))
    if "loop" in only:
        pairs = [(loop_rate(steps), lock_step_rate(steps)) for _ in range(rounds)]
        note = f"{statistics.median(ours for ours, _ in pairs):.0f} steps/s against {pairs[0][1]:.0f}"
        found.append(("whole loop against lock step", [ours / plain for ours, plain in pairs], note))
    if "waves" in only:
        ratios = [loop_rate(steps) / loop_rate(steps, "episode.env.num_envs=32") for _ in range(rounds)]
        found.append(("64 environments at once against 32", ratios, "same 64 episodes a step"))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["batches", "loop", "waves"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.only, given.rounds, given.steps)
    rows = ["| | median | lowest to highest | target | |", "|---|---|---|---|---|"]
    for name, ratios, note in found:
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        rows.append(f"| {name} | {statistics.median(ratios):.2f} times | {spread} | {TARGETS.get(name, '')} | {note} |")
    text = "\n".join(rows)
    print(text)
    if given.json:
        given.json.write_text(json.dumps({name: ratios for name, ratios, _ in found}), encoding="utf-8")
    if given.write:
        write_table(given.write, "benchmarks/embodied_loop.py", text)


if __name__ == "__main__":
    main()
