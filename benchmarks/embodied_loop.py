"""A robot's whole loop: concurrent simulators, policy and training, against the same work in lock step in one process.

- `batches`: turns per second of the policy's engine, 64 requests in dynamic batches against one after another.
- `loop`: simulated steps per second of the recipe `robot`, against a plain loop in this process, which uses one core:
  all environments act, then all are stepped, then the policy and its critic are trained on the result, with the same
  engines. Seconds of wall clock. The limit is this ratio if two idle cores shared the CPU seconds of the loop evenly;
  without any cost of the loop's own it would be 2.
- `quarters`: CPU seconds of the loop, without its simulators, if each environment is a granule of its own, against
  quarters of them.
- `pictures`: the simulators' part of the CPU seconds of the recipe `robot-pixels`, with 16 environments.

Ratios compare neighbours in time; lowest and highest are over the rounds. CPU seconds depend less on the load of the
machine than seconds of wall clock.

    python benchmarks/embodied_loop.py [--only batches loop quarters pictures] [--rounds 3] [--steps 4] [--json x.json]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

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
from interlace.observe.progress import REWARD, Headline, QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.observe.stop import StopSignal
from interlace.robots.envs.load import create_envs
from interlace.robots.episodes.robot import RobotConfig
from interlace.robots.features import StateFeatures
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.train import train

PARTS = ("batches", "loop", "quarters", "pictures")
TARGETS = {"dynamic batches against one at a time": "4 times", "whole loop against lock step": "2 times"}
CORES = 2
SKIPPED = 1
"""First steps of a run that are not measured."""
PICTURES = ("episode.env.num_envs=16", "prompts_per_step=16")


@dataclass(frozen=True, slots=True)
class Speed:
    """Speed of a loop."""

    steps_per_s: float
    """Simulated steps per second of wall clock."""
    cpu_s: float
    """CPU seconds of all processes for 1000 simulated steps."""
    parts_s: Mapping[str, float]
    """CPU seconds of parts for 1000 simulated steps."""


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of each round."""

    name: str
    values: Sequence[float]
    note: str = ""
    unit: str = "times"


class Meter(QuietProgress):
    """Records the CPU seconds of this process at the end of each step."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    def step(self, step: int, metrics: Mapping[str, float], headline: Headline = REWARD) -> None:  # noqa: ARG002
        """Records the end of a step."""
        self.cpu_s.append(time.process_time())


def recipe_of(*overrides: str, name: str = "robot") -> Recipe:
    """Returns a recipe without warm-up and evaluation, which do not affect the measurement."""
    return load_recipe(name, ["warmup=null", "task.starts.heldout_size=0", "logging.loggers=[]", *overrides])


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
        self.cpu_s: defaultdict[str, float] = defaultdict(float)
        """CPU seconds by part."""
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
        with self._timed("simulators"):
            observed = self.envs.reset(seeds=[0] * count, task_ids=[0] * count, init_state_ids=starts)
        turns: list[list[Response]] = [[] for _ in range(count)]
        alive, reward, done = list(range(count)), np.zeros(count), 0
        while alive:
            with self._timed("policy"):
                answers = self.policy.answer(self.policy.requests(observed["state"]))
                chosen = np.stack([self.policy.actions.decode(answer.token_ids) for answer in answers])
            with self._timed("simulators"):
                result = self.envs.chunk_step(chosen, alive)
            done += int(result.valid.sum()) * 2
            for row, slot in enumerate(alive):
                turns[slot].append(answers[row])
                reward[slot] = float(result.success[row])
            keep = [row for row in range(len(alive)) if not result.ended[row]]
            alive = [alive[row] for row in keep]
            observed = {name: array[keep] for name, array in result.observation.items()}
        with self._timed("training"):
            self._train([self._sample(slot, own, reward[slot]) for slot, own in enumerate(turns)])
        return done

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        began_s = time.process_time()
        yield
        self.cpu_s[part] += time.process_time() - began_s

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


def lock_step(steps: int) -> Speed:
    """Returns the speed of the plain loop."""
    torch.set_num_threads(1)
    loop = LockStep(recipe_of())
    loop.step(0)
    loop.cpu_s.clear()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    done = sum(loop.step(number) for number in range(1, steps + 1))
    parts_s = {part: cpu_s / done * 1000 for part, cpu_s in loop.cpu_s.items()}
    return Speed(done / (time.perf_counter() - began_s), (time.process_time() - began_cpu_s) / done * 1000, parts_s)


def loop(steps: int, *overrides: str, name: str = "robot") -> Speed:
    """Returns the speed of a recipe."""
    settings = (f"steps={steps + SKIPPED}", "logging.timeline=false", *overrides)
    recipe, meter = recipe_of(*settings, name=name), Meter()
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder.create(Path(root), "run")
        folder.write_config(recipe)
        train(recipe, folder, resume=False, progress=meter, stop=StopSignal(lambda: None))
        lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()][SKIPPED:]
    done = sum(line["env/steps"] for line in lines)
    simulators_s = sum(line["env/seconds"] for line in lines)
    cpu_s = meter.cpu_s[-1] - meter.cpu_s[SKIPPED - 1] + simulators_s
    parts_s = {"simulators": simulators_s / done * 1000}
    return Speed(done / sum(line["timing_s/step"] for line in lines), cpu_s / done * 1000, parts_s)


def compare_with_lock_step(rounds: int, steps: int) -> list[Row]:
    """Measures the loop against lock step, and the limit of the ratio."""
    pairs = [(loop(steps), lock_step(steps)) for _ in range(rounds)]
    ours, plain = pairs[0]
    rates = [statistics.median(one.steps_per_s for one in side) for side in zip(*pairs, strict=True)]
    parts = ", ".join(f"{part} {cpu_s:.2f}" for part, cpu_s in plain.parts_s.items())
    note = f"CPU s of 1000 steps: loop {ours.cpu_s:.2f}; lock step {plain.cpu_s:.2f}, of it {parts}"
    return [
        Row(
            "whole loop against lock step",
            [one.steps_per_s / two.steps_per_s for one, two in pairs],
            f"{rates[0]:.0f} steps/s against {rates[1]:.0f}",
        ),
        Row("limit of this ratio on two cores", [CORES * two.cpu_s / one.cpu_s for one, two in pairs], note),
    ]


def measure(only: Sequence[str], rounds: int, steps: int) -> list[Row]:
    """Returns the figures."""
    found: list[Row] = []
    if "batches" in only:
        found.append(Row("dynamic batches against one at a time", batches(rounds), "64 turns, one engine"))
    if "loop" in only:
        found += compare_with_lock_step(rounds, steps)
    if "quarters" in only:
        pairs = [(loop(steps, "schedule.granularity.env=25%"), loop(steps)) for _ in range(rounds)]
        # The simulators' part is the same work in both.
        beside = [[one.cpu_s - one.parts_s["simulators"] for one in pair] for pair in pairs]
        note = f"CPU s of 1000 steps without simulators: {beside[0][1]:.2f} against {beside[0][0]:.2f}"
        found.append(Row("each environment alone against quarters", [two / one for one, two in beside], note))
    if "pictures" in only:
        speeds = [loop(steps, *PICTURES, name="robot-pixels") for _ in range(rounds)]
        shares = [100 * one.parts_s["simulators"] / one.cpu_s for one in speeds]
        note = f"CPU seconds, 16 environments; {statistics.median(one.steps_per_s for one in speeds):.0f} steps/s"
        found.append(Row("simulators' part of the loop, pictures", shares, note, "%"))
    return found


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    found = measure(given.only, given.rounds, given.steps)
    rows = ["| | median | lowest to highest | target | |", "|---|---|---|---|---|"]
    for row in found:
        middle, low, high = (f"{each(row.values):.3g}" for each in (statistics.median, min, max))
        target = TARGETS.get(row.name, "")
        rows.append(f"| {row.name} | {middle} {row.unit} | {low} to {high} | {target} | {row.note} |")
    print("\n".join(rows))
    if given.json:
        given.json.write_text(json.dumps({row.name: row.values for row in found}), encoding="utf-8")


if __name__ == "__main__":
    main()
