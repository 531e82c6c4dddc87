"""Builds a profile from the records of a run, during the run or later, without measuring a worker.

The trace contains the calls of engines, training and publication; metrics and samples contain the tokens. The costs of
each kind of call are fitted to these, and then all costs to the times of the run's steps, as in a measured profile.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from interlace.core.errors import UserError
from interlace.flows.step_metrics import SCORED
from interlace.forecast.profile.fit import batches_to, fit, intraclass_correlation
from interlace.forecast.profile.profile import device_name
from interlace.forecast.profile.rollout import rising
from interlace.forecast.profile.samples import lengths_of, sizes_of
from interlace.forecast.profile.steps import FEWEST, FILLING, StepTimes, fit_profile, waiting_s
from interlace.forecast.profile.types import (
    InferenceCosts,
    Lengths,
    Profile,
    RewardCosts,
    RolloutCosts,
    StateCosts,
    TrainCosts,
)
from interlace.models.loading import empty_model
from interlace.models.size import model_size
from interlace.observe.run_data import RunData, Transcript
from interlace.observe.run_folder import RunFolder
from interlace.observe.trace_events import DEVICE_PROCESS, RUN_PROCESS, WORKER_PROCESS, TraceEvents
from interlace.run.clusters.base import back_end
from interlace.run.recipe.config import Recipe, is_offline
from interlace.run.recipe.load import load_recipe
from interlace.runtime.timeline import Span, StepRecord
from interlace.workers.rollout import MIN_CALL_S

OPTIMIZER_BYTES = 16
"""Bytes per trained parameter in float32: the parameter, its gradient and two moments."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Slice:
    """One operation of one rank."""

    span: Span
    """Time span of the operation. Its devices are only counted: their numbers are placeholders."""
    args: Mapping[str, Any]
    """Other arguments of the operation in the trace."""

    @property
    def seconds(self) -> float:
        return self.span.end_s - self.span.start_s


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadTrace:
    """Operations and steps of a trace, in order of time."""

    slices: Sequence[Slice]
    steps: Sequence[StepRecord]
    note: str = ""
    """Note on damaged lines, or empty."""

    def of(self, role: str, *operations: str, after_step: int = 0) -> list[Slice]:
        """Returns a role's operations of these names, in training steps after `after_step`."""
        return [
            each
            for each in self.slices
            if each.span.role == role and each.span.operation in operations and each.span.step > after_step
        ]


def read_trace(path: Path) -> ReadTrace:
    """Reads a trace. Raises UserError if the file does not exist; see TraceEvents."""
    if not path.is_file():
        raise UserError(f"there is no {path}: the run was made with logging.timeline=false. Measure with a recipe.")
    read = TraceEvents.read(path)
    events = read.events
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    ends = {event["id"]: event["ts"] for event in events if event["ph"] == "e"}
    work = [event for event in events if event["ph"] in ("X", "b")]
    # A device's slice does not name its rank, so devices are divided among equal operations that started together.
    devices = Counter((event["name"], event["ts"]) for event in work if event["pid"] == DEVICE_PROCESS)
    ranks = Counter((event["name"], event["ts"]) for event in work if event["pid"] == WORKER_PROCESS)
    slices = [
        _make_slice(event, track, devices[when] // ranks[when], ends)
        for event in work
        if event["pid"] == WORKER_PROCESS
        and (track := tracks.get((event["pid"], event["tid"])))
        and (when := (event["name"], event["ts"]))
    ]
    steps = [
        StepRecord(step=e["args"]["step"], start_s=e["ts"] / 1e6, end_s=(e["ts"] + e["dur"]) / 1e6, counts={})
        for e in work
        if e["pid"] == RUN_PROCESS
    ]
    return ReadTrace(slices=slices, steps=steps, note=read.note)


def _make_slice(event: Mapping[str, Any], track: str, num_devices: int, ends: Mapping[int, float]) -> Slice:
    group, _, rank = track.partition(" rank ")
    end_us = event["ts"] + event["dur"] if event["ph"] == "X" else ends.get(event["id"], event["ts"])
    args = event["args"]
    span = Span(
        start_s=event["ts"] / 1e6,
        end_s=end_us / 1e6,
        devices=tuple(range(num_devices)),
        group=group,
        rank=int(rank or 0),
        operation=event["name"].partition(".")[2],
        cause=args.get("cause", ""),
        step=args["step"],
        version=args.get("version", 0),
        bin=args.get("bin"),
    )
    return Slice(span=span, args=args)


def profile_of_run(folder: RunFolder) -> tuple[Recipe, Profile]:
    """Returns the run's recipe, and the costs of its workers. The run must have been made on this machine.

    Raises UserError if the run has too few steps, or samples of several turns: records contain no times of tools.
    """
    recipe, run = load_recipe(str(folder.config)), RunData.read(folder)
    if is_offline(recipe):
        raise UserError(
            f"run {folder.path} trained on given rows (algorithm {recipe.algorithm.name!r}), so its records have no "
            "costs of generation. Name a run whose policy generated samples."
        )
    if not recipe.episode.is_single_turn:
        raise UserError(
            f"run {folder.path} has episodes of several turns, and its records do not say how long tools take. Measure "
            f"them: interlace profile {folder.config}"
        )
    if len(run.rows) < FEWEST:
        raise UserError(
            f"run {folder.path} has logged {len(run.rows)} steps; a profile is fitted to {FEWEST} or more. Wait for "
            "them, or measure the recipe: interlace profile RECIPE."
        )
    trace, devices = read_trace(folder.timeline), back_end(recipe.cluster).find_devices(recipe.cluster)
    size = model_size(empty_model(recipe.model))
    trained_bytes = OPTIMIZER_BYTES * size.num_parameters
    state = {"state_bytes": trained_bytes, "moment_bytes": trained_bytes // 2}
    lengths = _read_lengths(run)
    tokens = _count_trained_tokens(run, lengths.prompt_tokens, len(devices))
    actor = _fit_training(trace, "actor", tokens, recipe.epochs).model_copy(update=state)
    rollout, num_spanned = _fit_rollout(trace, recipe), _num_devices(trace.of("rollout", "serve"))
    cache_bytes = rollout.cache_tokens(num_spanned) * size.kv_bytes_per_token // num_spanned
    profile = Profile(
        device=device_name(devices[0]),
        model=recipe.model.path,
        sizes=sizes_of(recipe),
        source=f"records of run {folder.name}{f' ({trace.note})' if trace.note else ''}",
        device_memory_bytes=devices[0].memory_bytes,
        rollout=rollout.model_copy(update={"state_bytes": size.weight_bytes, "device_bytes": cache_bytes}),
        reward=_fit_reward(trace, recipe, run),
        lengths=lengths,
        reference=_fit_reference(trace, tokens, size.weight_bytes),
        critic=_fit_training(trace, "critic", tokens, recipe.epochs).model_copy(update=state)
        if trace.of("critic", "accumulate")
        else None,
        actor=actor,
    )
    spans = [each.span for each in trace.slices]
    waiting = [waiting_s(step, spans) for step in trace.steps]
    return recipe, fit_profile(profile, StepTimes.of(run.values, waiting), recipe, len(devices))


def _fit_rollout(trace: ReadTrace, recipe: Recipe) -> RolloutCosts:
    """Fits the costs of the engine: prefill, reads of cached tokens, and decode steps by batch."""
    served = trace.of("rollout", "serve", after_step=1)
    calls = [each for each in served if each.args.get("new_tokens") and "held_tokens" in each.args]
    if not calls:
        raise UserError("the run's trace does not say what its engines computed: it is of an older version. Measure.")
    # A call ends soon after one of its sequences, so most of its steps have the initial batch size.
    largest = max(each.args["batch"] for each in calls)
    batches = batches_to(largest)
    steps = np.asarray([each.args["new_tokens"] / each.args["batch"] for each in calls])
    shares = np.stack([np.interp([each.args["batch"] for each in calls], batches, row) for row in np.eye(len(batches))])
    seen = [place for place in range(len(batches)) if shares[place].any()]
    rows = [
        [1.0, _prompt_tokens(each), count * each.args["held_tokens"], *(count * shares[seen, place])]
        for place, (each, count) in enumerate(zip(calls, steps, strict=True))
    ]
    speed = StateCosts().speed(_num_devices(calls))
    found = fit(rows, [each.seconds * speed for each in calls])
    call_s, prefill_token_s, context_token_s, *steps_s = map(float, found)
    costs = RolloutCosts(
        steps=rising([batches[place] for place in seen], steps_s),
        call_s=call_s,
        prefill_token_s=prefill_token_s,
        context_token_s=context_token_s,
        kv_tokens=_count_kv_tokens(calls, recipe),
        engine_kv_tokens=0 if recipe.rollout.max_tokens == "auto" else recipe.rollout.kv_tokens,
        max_running=recipe.rollout.max_running,
        min_call_s=MIN_CALL_S,
        update_s=_median_s(trace.of("rollout", "update_weights")),
    )
    return costs.model_copy(update=_find_moves(trace, "rollout"))


def _count_kv_tokens(calls: Sequence[Slice], recipe: Recipe) -> int:
    """Returns the capacity of an engine's KV cache on one device, in tokens.

    Of max_tokens=auto, it is the device's part of the capacity, which is estimated from the calls, on the low side.
    """
    if recipe.rollout.max_tokens != "auto":
        return recipe.rollout.kv_tokens
    found = [each.args["held_tokens"] / each.args["kv_use"] for each in calls if each.args["kv_use"]]
    return max(1, round(max(found, default=recipe.rollout.kv_tokens) / _num_devices(calls)))


def _prompt_tokens(call: Slice) -> float:
    """Returns the prompt tokens that an engine computed: once for samples of one prompt that arrived together."""
    names = call.args.get("samples", ())
    return float(call.args["prompt_tokens"]) * (len(names) / _num_samples(call) if names else 1.0)


def _fit_training(trace: ReadTrace, role: str, tokens: Mapping[float, float], epochs: int) -> TrainCosts:
    training = trace.of(role, "accumulate", after_step=FILLING)
    costs = TrainCosts(token_s=0.0)
    speed = costs.speed(_num_devices(training))
    inference = trace.of(role, "logprobs", "values", "process_rewards", after_step=FILLING)
    return costs.model_copy(
        update={
            "token_s": _token_s(training, tokens) / epochs * speed,
            "inference_token_s": _token_s(inference, tokens) * speed,
            "optimizer_s": _median_s(trace.of(role, "optimizer_step")) * speed,
            "export_s": _median_s(trace.of(role, "export_weights")),
            **_find_moves(trace, role),
        }
    )


def _fit_reference(trace: ReadTrace, tokens: Mapping[float, float], weight_bytes: int) -> InferenceCosts | None:
    calls = trace.of("reference", "logprobs", after_step=FILLING)
    if not calls:
        return None
    speed = StateCosts().speed(_num_devices(calls))
    costs = InferenceCosts(token_s=_token_s(calls, tokens) * speed, state_bytes=weight_bytes)
    return costs.model_copy(update=_find_moves(trace, "reference"))


def _num_devices(calls: Sequence[Slice]) -> int:
    """Returns the devices of an instance, summed over its ranks."""
    ranks = {each.span.rank: len(each.span.devices) for each in calls}
    return max(1, sum(ranks.values()))


def _token_s(calls: Sequence[Slice], tokens: Mapping[float, float]) -> float:
    """Returns the seconds per token of the calls of a step. tokens: those that each step trained on."""
    seconds = dict.fromkeys((each.span.step for each in calls), 0.0)
    for each in calls:
        if each.span.rank == 0:
            seconds[each.span.step] += each.seconds
    return median([taken / tokens[step] for step, taken in seconds.items() if tokens.get(step)] or [0.0])


def _fit_reward(trace: ReadTrace, recipe: Recipe, run: RunData) -> RewardCosts:
    if recipe.reward is None:
        return RewardCosts()
    calls = trace.of("reward", "score", after_step=FILLING)
    workers, least = max(1, recipe.reward.workers), recipe.reward.least_right
    right = [[(each.reward or 0.0) >= least for each in group] for group in _read_groups(run) if group]
    rows = [float(max(1, _num_samples(each)) / workers) for each in calls]
    return RewardCosts(
        median_s=median([each.seconds / max(1.0, waves) for each, waves in zip(calls, rows, strict=True)] or [0.0]),
        max_s=recipe.reward.timeout_s,
        workers=workers,
        solve_rate=fmean(verdict for group in right for verdict in group) if right else 0.5,
        solve_spread=intraclass_correlation(right) if right else 0.3,
    )


def _num_samples(call: Slice) -> int:
    return sum(name.count(",") + 1 for name in call.args.get("samples", ()))


def _read_lengths(run: RunData) -> Lengths:
    groups = [[float(each.num_tokens) for each in group] for group in _read_groups(run)]
    counts = [dict(run.curve(f"samples/{event}")) for event in SCORED]
    # A step without a scored sample has no mean length.
    responses = sum(
        mean * sum(count.get(step, 0.0) for count in counts) for step, mean in run.curve("response_length/mean")
    )
    num_scored = sum(sum(count.values()) for count in counts)
    prompts = (sum(run.values("perf/num_tokens")) - responses) / max(1.0, num_scored)
    # Only runs with dispatch by length report the rank correlation of their predictions.
    ranks = run.values("rollout/length_rank")
    return lengths_of(
        groups, prompt_tokens=max(1, round(prompts)), rank_correlation=max(0.0, ranks[-1]) if ranks else 0.0
    )


def _count_trained_tokens(run: RunData, prompt_tokens: int, num_devices: int) -> dict[float, float]:
    """Returns the prompt and response tokens that each step trained on, without the tokens of filtered groups."""
    step_s, samples = dict(run.curve("timing_s/step")), dict(run.curve("samples/trained"))
    rates = run.curve("goodput/trained_tokens_per_device_s")
    return {step: rate * step_s[step] * num_devices + prompt_tokens * samples[step] for step, rate in rates}


def _read_groups(run: RunData) -> list[list[Transcript]]:
    """Returns the finished samples of each prompt in each step."""
    found: dict[tuple[int, str], list[Transcript]] = {}
    for each in run.transcripts:
        if each.num_tokens and each.reward is not None:
            found.setdefault((each.step, each.uid), []).append(each)
    return list(found.values())


def _find_moves(trace: ReadTrace, role: str) -> dict[str, float]:
    """Returns the seconds to move a role's state off the devices and back, over one device's link."""
    found = {}
    for name in ("onload", "offload"):
        calls = trace.of(role, name, after_step=-1)
        found[f"{name}_s"] = median([each.seconds * max(1, len(each.span.devices)) for each in calls] or [0.0])
    return found


def _median_s(calls: Sequence[Slice]) -> float:
    return median([each.seconds for each in calls] or [0.0])
