"""Agents on one engine: admission of whole episodes and asynchronous tools, against ThunderAgent's published ratio.

ThunderAgent (2602.13692) publishes 1.8 to 3.9 times the rollout throughput of vLLM behind a gateway, with coding agents
on two nodes of eight H100. Turns, tokens and seconds of tools are not published here: they are assumed below.
"""

from dataclasses import dataclass
from functools import cache
from textwrap import wrap
from typing import Literal

from interlace.forecast.costs.profiles import load_profile
from interlace.forecast.profile.types import Lengths, Turns
from interlace.forecast.simulate import Simulation, simulate
from interlace.run.recipe.load import load_recipe

TURNS = Turns(turns=(10, 20, 30, 40, 60), given_tokens=(100, 300, 600, 1500), tool_s=(0.2, 0.5, 1, 3, 15))
"""A coding agent: 31 turns in the mean, whose tools answer after a second in the median with 450 tokens."""
LENGTHS = Lengths(prompt_tokens=2000, median=120, prompt_sigma=0.3, response_sigma=0.7)
EPISODES = (64, 128, 256)
"""Episodes of the engine, whose cache of 800,000 tokens has room for about 60 mean contexts."""
BATCHED = 128
"""Episodes of the rows with synchronous tools."""
MEMORY = 10**13
"""Bytes of a device: the trainer shares it, and only generation is compared."""


@dataclass(frozen=True, kw_only=True)
class System:
    """A system that serves the episodes."""

    name: str
    eviction: Literal["fewest_tokens", "least_recent"]
    concurrency: str
    tools: Literal["asynchronous", "synchronous"] = "asynchronous"


PLAIN = System(name="requests, LRU", eviction="least_recent", concurrency="none")
BATCH = System(name="requests, LRU, tools as a batch", eviction="least_recent", concurrency="none", tools="synchronous")
SYSTEMS = (
    PLAIN,
    System(name="64 requests at once, LRU", eviction="least_recent", concurrency="64"),
    System(name="whole episodes, LRU", eviction="least_recent", concurrency="episodes"),
    System(name="whole episodes, smallest context first", eviction="fewest_tokens", concurrency="episodes"),
)
BATCHES = (
    BATCH,
    System(
        name="whole episodes, smallest context first, tools as a batch",
        eviction="fewest_tokens",
        concurrency="episodes",
        tools="synchronous",
    ),
)


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """Generation of one step."""

    seconds: float
    reused: float
    """Reused share of earlier turns' tokens."""


@cache
def roll_out(system: System, num_episodes: int) -> Rollout:
    """Simulates the generation of one step on one device."""
    base = load_profile("qwen2.5-7b-h800")
    profile = base.model_copy(
        update={
            "turns": TURNS.model_copy(update={"tools": system.tools}),
            "lengths": LENGTHS,
            "device_memory_bytes": MEMORY,
            "rollout": base.rollout.model_copy(update={"eviction": system.eviction}),
        }
    )
    settings = (
        "schedule=verl-colocated",
        f"schedule.concurrency={system.concurrency}",
        "algorithm=reinforce_pp",
        "steps=1",
        "minibatches=1",
        f"prompts_per_step={num_episodes}",
        "samples_per_prompt=1",
        "sampling.max_new_tokens=2000",
    )
    run = simulate(load_recipe("calculator", settings), Simulation(profile=profile, num_devices=1))
    metrics, ledger = run.results[-1].metrics, run.ledger
    trains_s = ledger.total_s * sum(ledger.fraction(name) for name in ("train", "weight_sync", "switch"))
    found = Rollout(seconds=ledger.total_s - trains_s, reused=metrics["rollout/history_reused"])
    print(
        f"{system.name} | {num_episodes} | {found.seconds:.0f} s | {found.reused:.0%}",
        flush=True,
    )
    return found


def tabulate() -> str:
    """Returns the table in Markdown: each system against requests under LRU, at each number of episodes."""
    heads = (
        "admission and eviction",
        *(f"{number} episodes" for number in EPISODES),
    )
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for system in (*SYSTEMS, *BATCHES):
        numbers = EPISODES if system in SYSTEMS else (BATCHED,)
        cells = [_cell(system, number) if number in numbers else "" for number in EPISODES]
        lines.append(f"| {system.name} | {' | '.join(cells)} |")
    whole = SYSTEMS[2]
    best = max(roll_out(PLAIN, each).seconds / roll_out(whole, each).seconds for each in EPISODES)
    tools = roll_out(BATCH, BATCHED).seconds / roll_out(PLAIN, BATCHED).seconds
    both = roll_out(BATCH, BATCHED).seconds / roll_out(whole, BATCHED).seconds
    text = (
        f"Whole episodes on an LRU engine: up to {best:.2f}x, against 1.8-3.9x published. Asynchronous tools alone, at "
        f"{BATCHED} episodes: {tools:.2f}x; both: {both:.2f}x."
    )
    return "\n".join([*lines, "", *wrap(text, 120)])


def _cell(system: System, num_episodes: int) -> str:
    ratio = roll_out(PLAIN, num_episodes).seconds / roll_out(system, num_episodes).seconds
    return f"{ratio:.2f}x ({roll_out(system, num_episodes).reused:.0%})"
