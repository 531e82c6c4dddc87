"""Random schedules, placements and workloads, each determined by its seed."""

import random

from interlace.algorithms.base import Needs
from interlace.runtime.sim.cluster import Fault
from interlace.schedule.schedule import Schedule
from tests.support.cost_workers import Costs
from tests.support.sim_run import Workload


def _some_devices(rng: random.Random, size: int) -> str:
    count = rng.randint(1, size)
    first = rng.randint(0, size - count)
    return rng.choice(["all", f"{first}-{first + count - 1}"])


def random_schedule(rng: random.Random, num_devices: int, *, synchronous: bool = False) -> Schedule:
    def granule() -> str | int:
        return rng.choice(["step", "group", "sample", 1, 3, 7, 64])

    placement = {role: _some_devices(rng, num_devices) for role in ("rollout", "reference", "actor")}
    placement["critic"] = {"devices": _some_devices(rng, num_devices), "devices_per_instance": "all"}
    staleness = 0.0 if synchronous else rng.choice([0, 0.3, 0.5, 1, 1, 1.7, 2, 3])
    fields = {
        "placement": placement,
        "granularity": {stage: granule() for stage in ("reference", "critic", "actor")},
        "max_staleness": staleness,
        "pipeline_depth": rng.choice([None, None, staleness / 2]),
        "sync_every": rng.choice([1, 1, 2, 3]),
        "batching": rng.choice(["step", "arrival", "arrival"]),
        "publish": rng.choice(["blocking", "background"]),
        "on_update": rng.choice(["drain", "abort_resume", "keep", "recompute"]),
        "weight_update": rng.choice(["all_at_once", "rolling"]),
        "rollout_budget": rng.choice([None, None, 10, 60]),
        "dispatch": rng.choice(["round_robin", "least_tokens", "longest_first", "skew_aware"]),
        "tail": rng.choice(["none", "none", {"kind": "migrate", "remaining_share": 0.5, "batch": rng.choice([2, 8])}]),
        "lend_until": rng.choice([None, None, 0.3, 0.8]),
        "min_hold": rng.choice([0, 0, 0.3]),
        "switch": rng.choice(["when_idle", "when_ready"]),
        "concurrency": rng.choice(
            [None, None, 1, 2, 5, "adaptive", "episodes", {"kind": "adaptive", "initial": 1, "ceiling": 4}]
        ),
    }
    if fields["on_update"] != "keep":
        fields["kv_on_switch"] = rng.choice(["offload", "recompute"])
    if fields["batching"] == "arrival":
        fields["on_straggler"] = rng.choice(["hold", "hold", "drop", "requeue"])
    if not synchronous and rng.random() < 0.2:
        shares = {"prompts": rng.choice([1.0, 1.25, 2]), "responses": rng.choice([1.0, 1.25, 2])}
        kind = rng.choice(["oversample", "tail_batching"])
        fields |= {"max_staleness": 0, "pipeline_depth": None, "sync_every": 1, "tail": {"kind": kind, **shares}}
    if fields["batching"] == "arrival":
        fields["overtake"] = rng.choice([None, None, 0, 0.3, 1])
    return Schedule.parse(fields)


def random_workload(rng: random.Random) -> Workload:
    prompts_per_step, num_steps = rng.randint(1, 5), rng.choice([2, 3, 5, 8])
    critic, reference = rng.random() < 0.3, rng.random() < 0.7
    size = int(prompts_per_step * num_steps * rng.choice([0.5, 0.9, 1.0, 2.0, 4.0])) + 1
    return Workload(
        prompts_per_step=prompts_per_step,
        samples_per_prompt=rng.randint(2, 4),
        num_steps=num_steps,
        num_prompts=rng.choice([None, size]),
        minibatches=rng.choice([1, 2, 3]),
        needs=Needs(reference=reference, critic=critic),
        costs=Costs(
            median_tokens=rng.choice([10, 40]),
            max_tokens=rng.choice([200, 800]),  # long tails and a fast trainer test the deadlines
            train_token=rng.choice([1e-5, 1e-3]),
            optimizer=rng.choice([0.0, 0.2]),
            sync=rng.choice([0.01, 2.0]),
            kv_tokens=rng.choice([60, 300, 10**9]),
            fail_share=rng.choice([0, 0, 0.1, 0.5]),
            filter_share=rng.choice([0, 0, 0.3, 0.6]),
        ),
        refill_rounds=rng.choice([10**6, 10**6, 1, 0]),
        num_devices=rng.randint(1, 6),
        device_memory=rng.choice([10, 25, 100]),
    )


def random_fault(rng: random.Random) -> Fault:
    group, operations = rng.choice([
        ("rollout/0", ("serve", "update_weights", "abort", "interrupt", "onload")),
        ("reward", ("score",)),
        ("reference/0", ("logprobs",)),
        ("critic/0", ("values", "accumulate")),
        ("actor/0", ("accumulate", "optimizer_step", "export_weights", "offload")),
    ])  # fmt: skip
    return Fault(
        group=group,
        operation=rng.choice(operations),
        call=rng.choice([0, 1, 3, 10, 30]),
        kind=rng.choice(["stall", "stall", "death", "lost_message"]),
        seconds=rng.choice([0.1, 3.0, 60.0]),
    )
