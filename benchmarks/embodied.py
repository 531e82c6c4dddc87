"""Robots' simulators: the cost of swapping states, the gain of physics only inside a chunk, and a fleet of processes.

- `swap`: saving one MetaWorld environment's state and loading another, as between two chunks.
- `light`: steps per CPU second with only the physics inside a chunk, against MetaWorld's whole step, by task.
- `fleet`: steps per second of wall clock of environments in lock step in this process, against a fleet of two processes
  that episodes await, on the same starts and actions; and the simulators' share of the fleet's CPU seconds,
  which also include this process.
- `imagined`: distance of a world model's states from real ones after 1 to 16 chunks, in units of a chunk's typical
  change of each number, on unseen starts; in addition, the distance of an unchanged state. Rounds are seeds.
- `prefetch`: seconds of wall clock of updates on episodes, with the next minibatch prepared during the current one,
  against one after the other, on one torch thread: episodes of states, and of pictures of 64 x 64.
- `pictures`: the share of the transfer between processes in the CPU seconds of a chunk of actions with its picture, of
  16 environments, and the saving if the picture were in shared memory. The policy's forward pass is not counted.

Ratios compare neighbours in time; lowest and highest are over the rounds.

    python benchmarks/embodied.py [--only swap light fleet imagined prefetch pictures] [--rounds 3] [--json FILE]
"""

import argparse
import asyncio
import json
import socket
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from interlace.core.errors import UserError
from interlace.core.types import PROMPT, Prompt, Sample, SampleKey, Segment
from interlace.engines.train import TrainEngine, sft_loss
from interlace.engines.train.config import OptimizerConfig, TrainConfig
from interlace.models.action_tokens import action_tokens
from interlace.models.config import RobotShape
from interlace.robots.envs.base import VectorEnv
from interlace.robots.envs.fleet import EnvFleet
from interlace.robots.envs.load import EnvConfig, create_envs
from interlace.robots.models.vla import VLAForCausalLM, build_tiny_vla
from interlace.robots.world_model.model import EnsembleModel, EnsembleModelConfig, Transitions, error_by_horizon
from interlace.rollouts.envs.spec import SlotAnswer, SlotChunk, Start
from interlace.runtime.process.child import frame_message, take_frames

PARTS = ("swap", "light", "fleet", "imagined", "prefetch", "pictures")
TASKS = ("reach-v3", "push-v3", "pick-place-v3", "drawer-open-v3", "button-press-topdown-v3")
NUM_ENVS, CHUNK, REPEAT, WORKERS = 16, 4, 2, 2
SEEN = (0, 1, 2, 3, 4, 5, 6, 36, 37, 38)
"""Indices of MetaWorld's state that are imagined: hand, gripper, object, goal."""
LEARNT, HELD_OUT, LENGTH = 48, 16, 16
MINIBATCHES, EPISODES, TURNS = 6, 16, 8
"""Sizes for prefetching: minibatches, episodes of each, turns of an episode."""
TARGETS = {"fleet against lock step": "1.6 times"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One figure."""

    name: str
    value: str
    spread: str = ""
    """Lowest and highest value over the rounds."""
    note: str = ""


def settings(task: str, *, light: bool) -> dict[str, object]:
    """Returns settings whose episodes last longer than the measurement."""
    return {"tasks": [task], "light": light, "horizon": 1 << 20, "action_repeat": REPEAT, "end_on_success": False}


def begun(task: str, num_envs: int, *, light: bool) -> VectorEnv:
    """Creates environments and starts their episodes."""
    envs = create_envs("metaworld", settings(task, light=light), num_envs)
    envs.reset(seeds=[0] * num_envs, task_ids=[0] * num_envs, init_state_ids=range(num_envs))
    return envs


def chunks(num_chunks: int, num_envs: int) -> np.ndarray:
    """Returns random actions, [chunks, N, K, A]."""
    return np.random.default_rng(0).uniform(-1, 1, (num_chunks, num_envs, CHUNK, 4)).astype(np.float32)


def swap_rows(rounds: int, _num_chunks: int) -> list[Row]:
    """Measures a swap of states, without the steps between swaps."""
    envs = begun(TASKS[0], 1, light=True)
    simulator = envs._simulators.find(0, 0)  # no public name for the parts of a swap
    found = []
    for _ in range(rounds):
        began_s = time.process_time()
        for _ in range(500):
            simulator.load(simulator.save())
        found.append(1e6 * (time.process_time() - began_s) / 500)
    return [figure("swap of states", found, "{:.0f} us", note="away and back, one environment")]


def light_rows(rounds: int, num_chunks: int) -> list[Row]:
    """Measures physics only inside a chunk against the whole step."""
    rows = []
    for task in TASKS:
        both = [begun(task, 4, light=light) for light in (True, False)]
        ratios, speeds = [], []
        for _ in range(rounds):
            light, full = (steps_per_cpu_s(envs, num_chunks) for envs in both)
            ratios.append(light / full)
            speeds.append(light)
        note = f"{statistics.median(speeds):.0f} steps a CPU second"
        rows.append(figure(f"physics alone, {task.removesuffix('-v3')}", ratios, "{:.1f} times", note=note))
    return rows


def steps_per_cpu_s(envs: VectorEnv, num_chunks: int) -> float:
    """Steps environments in lock step. Returns steps per CPU second."""
    actions = chunks(num_chunks, envs.num_envs)
    began_s = time.process_time()
    for chunk in actions:
        envs.chunk_step(chunk)
    return actions.shape[0] * envs.num_envs * CHUNK * REPEAT / (time.process_time() - began_s)


def fleet_rows(rounds: int, num_chunks: int) -> list[Row]:
    """Measures a fleet against lock step."""
    actions = chunks(num_chunks, NUM_ENVS)
    envs = begun(TASKS[0], NUM_ENVS, light=True)
    ratios, shares, speeds = asyncio.run(against_lock_step(envs, actions, rounds))
    num_steps = actions.shape[0] * NUM_ENVS * CHUNK * REPEAT
    note = (
        f"{NUM_ENVS} environments, {WORKERS} processes, wall clock; {num_steps / statistics.median(speeds):.0f} steps/s"
    )
    return [
        figure("fleet against lock step", ratios, "{:.2f} times", note=note),
        figure("of the simulators' own speed", [100 * share for share in shares], "{:.0f} %", note="CPU seconds"),
    ]


async def against_lock_step(
    envs: VectorEnv, actions: np.ndarray, rounds: int
) -> tuple[list[float], list[float], list[float]]:
    """Runs both alternately. Returns ratios of wall seconds, shares of CPU seconds, and the fleet's wall seconds."""
    config = EnvConfig(family="metaworld", settings=settings(TASKS[0], light=True), num_envs=NUM_ENVS, workers=WORKERS)
    fleet = EnvFleet(config)
    ratios, shares, speeds = [], [], []
    try:
        await asyncio.gather(*(episode(fleet, index, actions[:1]) for index in range(NUM_ENVS)))
        for _ in range(rounds):
            wall_s, cpu_s, own_s = time.perf_counter(), time.process_time(), fleet.counts.busy_s
            await asyncio.gather(*(episode(fleet, index, actions) for index in range(NUM_ENVS)))
            fleet_s, cpu_s, own_s = (
                time.perf_counter() - wall_s, time.process_time() - cpu_s, fleet.counts.busy_s - own_s
            )  # fmt: skip
            wall_s = time.perf_counter()
            envs.reset(seeds=[0] * NUM_ENVS, task_ids=[0] * NUM_ENVS, init_state_ids=range(NUM_ENVS))
            for chunk in actions:
                envs.chunk_step(chunk)
            ratios.append((time.perf_counter() - wall_s) / fleet_s)
            shares.append(own_s / (own_s + cpu_s))
            speeds.append(fleet_s)
    finally:
        fleet.close()
    return ratios, shares, speeds


async def episode(fleet: EnvFleet, index: int, actions: np.ndarray) -> None:
    """Runs one environment's share of the work."""
    async with fleet.episode(Start(task=0, init_state=index)) as env:
        for chunk in actions[:, index]:
            await env.chunk_step(chunk)


def imagined_rows(rounds: int, _num_chunks: int) -> list[Row]:
    """Measures the growth of a world model's error with the horizon."""
    config = EnsembleModelConfig(state_size=len(SEEN), action_size=4, chunk=CHUNK)
    found, still = [], []
    for seed in range(rounds):
        states, actions, rewards, successes = collected(seed)
        model = EnsembleModel(config, seed=seed)
        learnt, held_out = (
            transitions(*(each[part] for each in (states, actions, rewards, successes)))
            for part in (slice(LEARNT), slice(LEARNT, None))
        )
        model.fit(learnt, steps=1500, seed=seed)
        found.append(error_by_horizon(model, held_out, range(1, LENGTH + 1)))
        scale = model.change_scale.numpy()
        moved = (states[LEARNT:, 1:] - states[LEARNT:, :1]) / scale
        still.append(np.sqrt((moved**2).mean(axis=(0, 2))))
    return [
        figure(
            f"imagined, {place} chunks",
            [errors[place] for errors in found],
            "{:.2f}",
            note=f"{statistics.median(float(one[place - 1]) for one in still):.2f} where the state stays as it was",
        )
        for place in (1, 2, 4, 8, 16)
    ]


def transitions(states: np.ndarray, actions: np.ndarray, rewards: np.ndarray, successes: np.ndarray) -> Transitions:
    """Concatenates episodes, [E, T ...] each with one more state, to transitions."""
    rows = len(actions) * LENGTH
    return Transitions(
        states=states[:, :-1].reshape(rows, -1),
        chunks=actions.reshape(rows, -1),
        next_states=states[:, 1:].reshape(rows, -1),
        has_next=np.ones(rows, np.float32),
        rewards=rewards.reshape(rows),
        successes=successes.reshape(rows),
        ends=np.zeros(rows, np.float32),
        firsts=(np.arange(rows) % LENGTH == 0).astype(np.float32),
    )


def collected(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Runs episodes of an expert with noise. Returns states [E, T + 1, D], chunks [E, T, C], rewards and successes."""
    num_envs = LEARNT + HELD_OUT
    envs = create_envs("metaworld", settings("push-v3", light=True), num_envs)
    starts = range(1000 * seed, 1000 * seed + num_envs)
    states = [envs.reset(seeds=[0] * num_envs, task_ids=[0] * num_envs, init_state_ids=starts)["state"]]
    noise, chunks, rewards, successes = np.random.default_rng(seed), [], [], []
    for _ in range(LENGTH):
        expert = np.repeat(envs.expert_actions()[:, None], CHUNK, axis=1)
        chunk = np.clip(expert + noise.normal(0, 0.4, expert.shape), -1, 1).astype(np.float32)
        result = envs.chunk_step(chunk)
        chunks.append(chunk.reshape(num_envs, -1))
        states.append(result.observation["state"])
        rewards.append(result.reward.sum(axis=1))
        successes.append(result.success.astype(np.float32))
    envs.close()
    seen = np.stack(states, axis=1)[..., list(SEEN)]
    return seen, np.stack(chunks, axis=1), np.stack(rewards, axis=1), np.stack(successes, axis=1)


def prefetch_rows(rounds: int, _num_chunks: int) -> list[Row]:
    """Measures updates with prefetched minibatches."""
    torch.set_num_threads(1)
    rows = []
    for name, image_size in (("states", 0), ("pictures", 64)):
        model, tokenizer = build_tiny_vla(RobotShape(state_size=4, action_size=4, chunk=4, image_size=image_size), 0)
        words = np.asarray(tokenizer("reach the goal")["input_ids"], np.int32)
        minibatches = [
            [played(model, words, image_size, EPISODES * number + place) for place in range(EPISODES)]
            for number in range(MINIBATCHES)
        ]
        config = TrainConfig(tokens_per_microbatch=8192)
        engine = TrainEngine(model, loss=sft_loss, optimizer=OptimizerConfig(), config=config)
        updated_s(engine, minibatches[:1], ahead=False)
        ratios, seconds = [], []
        for _ in range(rounds):
            plain_s, ahead_s = (updated_s(engine, minibatches, ahead=ahead) for ahead in (False, True))
            ratios.append(plain_s / ahead_s)
            seconds.append(plain_s / MINIBATCHES)
        began_s = time.perf_counter()
        engine.prepare(minibatches[0])
        laid_out_s = time.perf_counter() - began_s
        engine.accumulate_prepared()
        engine.optimizer_step()
        note = f"{1e3 * laid_out_s:.0f} ms of the {1e3 * statistics.median(seconds):.0f} ms of a minibatch"
        rows.append(figure(f"laid out ahead, {name}", ratios, "{:.2f} times", note=note))
    return rows


def updated_s(engine: TrainEngine, minibatches: Sequence[Sequence[Sample]], *, ahead: bool) -> float:
    """Trains on minibatches. Returns seconds of wall clock."""
    began_s = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        laying_out = pool.submit(engine.prepare, minibatches[0]) if ahead else None
        for place, samples in enumerate(minibatches):
            if laying_out is None:
                engine.accumulate(samples)
            else:
                laying_out.result()
                if place + 1 < len(minibatches):
                    laying_out = pool.submit(engine.prepare, minibatches[place + 1])
                engine.accumulate_prepared()
            engine.optimizer_step()
    return time.perf_counter() - began_s


def played(model: VLAForCausalLM, words: np.ndarray, image_size: int, number: int) -> Sample:
    """Returns an artificial episode."""
    actions, draw = action_tokens(model.config), np.random.default_rng(number)
    assert actions is not None
    context, queries = (np.asarray(ids, np.int32) for ids in (actions.placeholders, actions.query_ids))
    segments: list[Segment] = []
    for _ in range(TURNS):
        seen = {"state": draw.normal(size=(1, 4)).astype(np.float32)}
        if image_size:
            seen["image"] = draw.integers(0, 255, (1, image_size, image_size, 3)).astype(np.uint8)
        drawn = draw.integers(0, 255, len(queries)).astype(np.int32)
        put_in = Segment(parent=PROMPT, token_ids=context, sampled=np.zeros(len(context), np.bool_), inputs=seen)
        segments += [put_in, Segment(parent=len(segments), token_ids=drawn, query_ids=queries)]
    prompt = Prompt(uid=str(number), token_ids=words, text="", answer="")
    weights = np.ones(TURNS * (len(context) + len(queries)), np.float32)
    return Sample(key=SampleKey(number, 0), prompt=prompt, segments=tuple(segments), advantages=weights)


def picture_rows(rounds: int, num_chunks: int) -> list[Row]:
    """Measures the transfer of pictures from a simulator's process, without a second process."""
    rows = []
    for family, chunk, given in (
        ("metaworld", CHUNK, settings(TASKS[0], light=True)),
        ("gymnasium", 1, {"tasks": ["Pendulum-v1"], "horizon": 1 << 20}),
    ):
        for size in (64, 224):
            what = f"{size} x {size}, {family}, {chunk} actions"
            try:
                envs = create_envs(family, {**given, "image_size": size}, NUM_ENVS)
            except UserError as error:
                rows.append(Row(name=f"transfer, {what}", value="not run", note=str(error)))
                continue
            seen = envs.reset(seeds=[0] * NUM_ENVS, task_ids=[0] * NUM_ENVS, init_state_ids=range(NUM_ENVS))
            picture, actions = seen["image"][0], np.zeros((NUM_ENVS, chunk, envs.spec.action.size), np.float32)
            kept, shares, savings, step_s = np.empty_like(picture), [], [], 0.0
            for _ in range(rounds):
                began_s = time.process_time()
                for _ in range(num_chunks):
                    envs.chunk_step(actions)
                step_s = (time.process_time() - began_s) / num_chunks / NUM_ENVS
                sent_s = transferred_s({"image": picture}, chunk)
                # Both processes copy a shared picture once, because the environment's next chunk overwrites it.
                began_s = time.process_time()
                for _ in range(1000):
                    kept[...] = picture
                    kept.copy()
                shared_s = transferred_s({}, chunk) + (time.process_time() - began_s) / 1000
                shares.append(100 * sent_s / (step_s + sent_s))
                savings.append(100 * (sent_s - shared_s) / (step_s + sent_s))
            envs.close()
            rows.append(figure(f"transfer, {what}", shares, "{:.1f} %", note=f"of {1e3 * step_s:.1f} ms"))
            rows.append(figure(f"saving of shared memory, {what}", savings, "{:.1f} %"))
    return rows


def transferred_s(observation: dict[str, np.ndarray], chunk: int) -> float:
    """Returns the CPU seconds of the transfer of a result, in both processes together."""
    rewards, valid = np.zeros(chunk, np.float32), np.ones(chunk, np.bool_)
    found = SlotChunk(
        observation=observation, reward=rewards, valid=valid, terminated=False, truncated=False, success=False
    )
    sender, receiver = socket.socketpair()
    receiver.setblocking(False)
    received, repeats = bytearray(), 300
    began_s = time.process_time()
    for number in range(repeats):
        sender.sendall(frame_message(number, SlotAnswer(value=found)))
        with suppress(BlockingIOError):
            while part := receiver.recv(1 << 16):
                received += part
        assert len(take_frames(received)) == 1
    spent_s = time.process_time() - began_s
    sender.close()
    receiver.close()
    return spent_s / repeats


def figure(name: str, values: Sequence[float], form: str, *, note: str = "") -> Row:
    """Returns the row of a figure: the median with lowest and highest."""
    spread = "" if len(values) < 2 else f"{form.format(min(values))} to {form.format(max(values))}"
    return Row(name=name, value=form.format(statistics.median(values)), spread=spread, note=note)


def table(rows: Sequence[Row]) -> str:
    """Returns the rows as a table."""
    lines = ["| | median | lowest to highest | target | |", "|---|---|---|---|---|"]
    lines += [f"| {r.name} | {r.value} | {r.spread} | {TARGETS.get(r.name, '')} | {r.note} |" for r in rows]
    return "\n".join(lines)


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chunks", type=int, default=25, help="chunks an environment and round")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    measure = {"swap": swap_rows, "light": light_rows, "fleet": fleet_rows, "imagined": imagined_rows}
    measure |= {"prefetch": prefetch_rows, "pictures": picture_rows}
    rows = [row for part in given.only for row in measure[part](given.rounds, given.chunks)]
    print(table(rows))
    if given.json:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
