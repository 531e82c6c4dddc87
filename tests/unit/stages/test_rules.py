"""Each rule that keeps a run bounded and alive has a scenario that fails without the rule.

The numbers are from "The rules" in docs/schedules.md.
"""

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from interlace.algorithms.base import Needs
from interlace.core.errors import HangError, UserError
from interlace.core.types import Sample
from interlace.engines.train import OptimizerConfig, TrainConfig, TrainEngine, sft_loss
from interlace.runtime.timeline import KeepAll
from interlace.schedule.arbiter import Arbiter, Claim
from interlace.schedule.schedule import Schedule
from interlace.stages.batches import Batches
from interlace.stages.publish import Publisher
from tests.support import mutations
from tests.support.cost_workers import Costs
from tests.support.random_schedules import random_schedule, random_workload
from tests.support.sim_run import Record, Workload, check, check_minibatches, simulate
from tests.unit.engines.train.models import ragged_samples, tiny_model

LONG = Workload(
    prompts_per_step=8,
    num_steps=8,
    costs=Costs(median_tokens=20, max_tokens=400, train_token=1e-5, optimizer=0.0, sync=0.0),
)
"""Long-tailed responses, and a trainer that waits for them."""
SPLIT = {"actor": 0, "rollout": "1-3"}
STREAM = {"placement": SPLIT, "on_update": "keep", "granularity": {"actor": "sample"}}
PARTIAL = {"placement": SPLIT, "on_update": "abort_resume", "rollout_budget": 20, "batching": "arrival"}
WHOLE = {"devices": "0-1", "devices_per_instance": "all"}


def train(fields: dict[str, object], work: Workload = LONG, recorder: KeepAll | None = None) -> Record:
    schedule = Schedule.parse(fields)
    record = simulate(schedule, work, recorder=recorder)
    check(record, work, schedule.staleness_bound)
    return record


@contextmanager
def watched(owner: type, name: str, after: Callable[[object], None]) -> Iterator[None]:
    """Something is asserted after each call of a method."""
    original = getattr(owner, name)

    def seen(self: object) -> None:
        original(self)
        after(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, seen)
        yield


def filtered_groups_are_replaced() -> None:
    train({}, replace(LONG, costs=replace(LONG.costs, filter_share=0.4)))


def replaced_within_their_step() -> None:
    work = replace(LONG, costs=replace(LONG.costs, filter_share=0.4))
    record = train({"max_staleness": 2, "placement": SPLIT, "on_update": "keep"}, work)
    assert [len(step) for step in record.trained] == [8] * 8, "a batch is short"


def due_partials_go_on() -> None:
    def after(batches: object) -> None:
        assert isinstance(batches, Batches)
        admission, pool = batches._admission, batches._pool
        urgent = admission.batcher.urgent()
        if batches._open is None or batches._open.closed or urgent is None:
            return
        due = [
            name
            for name, job in pool._budget.suspended.items()
            if (ticket := admission.ticket(job.request.owner.gid)) and ticket.deadline <= urgent
        ]
        assert not due, "a sequence that is due is suspended"

    with watched(Batches, "fill", after):
        train({**PARTIAL, "max_staleness": 2, "rollout_budget": 10})


def partials_go_on_at_a_publication() -> None:
    publish = Publisher.publish

    async def published(self: Publisher, step: int) -> bool:
        is_new = await publish(self, step)
        assert not self._pool.num_suspended, "a sequence is suspended with its budget renewed"
        return is_new

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Publisher, "publish", published)
        train({**PARTIAL, "max_staleness": 2, "rollout_budget": 10})


def the_last_granule_needs_no_stall() -> None:
    assert train({"granularity": {"reference": 7}}).num_stalls == 0, "stalled"


def wide_claims_get_their_devices() -> None:
    work = replace(LONG, num_devices=2, needs=Needs(reference=True, critic=True))
    work = replace(work, costs=replace(LONG.costs, train_token=1e-3, optimizer=0.1))
    placement = {"rollout": "0", "reference": WHOLE, "critic": WHOLE, "actor": "0-1"}
    train({**STREAM, "max_staleness": 2, "batching": "arrival", "placement": placement, "granularity": "sample"}, work)


def claim(owner: str, *devices: int, stage: int) -> Claim:
    return Claim(owner=owner, devices=devices, stage=stage, preemptible=False)


def who_waits_reserves() -> None:
    arbiter, narrow = Arbiter(2, "when_idle"), [claim(f"narrow {place}", place % 2, stage=1) for place in range(9)]
    for each in narrow[:2]:
        arbiter.request(each)
    arbiter.decide()
    arbiter.request(claim("wide", 0, 1, stage=1))
    for running, following in zip(narrow, narrow[2:], strict=False):
        arbiter.request(following)
        arbiter.release(running)
        if "wide" in [each.owner for each in arbiter.decide().granted]:
            return
    raise AssertionError("the wide claim starves behind narrow ones")


def downstream_goes_first() -> None:
    arbiter, first = Arbiter(1, "when_idle"), claim("first", 0, stage=0)
    arbiter.request(first)
    arbiter.decide()
    for each in (claim("reference", 0, stage=2), claim("actor", 0, stage=4)):
        arbiter.request(each)
    arbiter.release(first)
    (granted,) = arbiter.decide().granted
    assert granted.owner == "actor", "upstream went first"


def only_rollout_is_preempted() -> None:
    arbiter = Arbiter(1, "when_ready")
    arbiter.request(claim("reference", 0, stage=2))
    arbiter.decide()
    arbiter.request(claim("actor", 0, stage=4))
    assert not arbiter.decide().yields, "inference is interrupted"


def a_draining_engine_starts_nothing() -> None:
    train({
        "max_staleness": 1, "batching": "arrival", "on_update": "drain", "placement": SPLIT, "publish": "background",
        "concurrency": 3,
    })  # fmt: skip


def trained_while_an_engine_swapped(weight_update: str) -> bool:
    work = replace(LONG, costs=replace(LONG.costs, sync=0.5, train_token=1e-3))
    fields = {"max_staleness": 3, "batching": "arrival", "on_update": "keep", "placement": SPLIT}
    recorder = KeepAll()
    train({**fields, "weight_update": weight_update}, work, recorder)
    swaps = [span for span in recorder.spans if span.operation == "update_weights"]
    steps = [span for span in recorder.spans if span.operation == "accumulate"]
    assert swaps
    return any(swap.start_s <= step.start_s < swap.end_s for step in steps for swap in swaps)


def every_engine_swapped_before_training_goes_on() -> None:
    assert not trained_while_an_engine_swapped("all_at_once"), "training went on while an engine swapped"


def rolling_swaps_hold_no_training_up() -> None:
    assert trained_while_an_engine_swapped("rolling"), "training waited for the engines"


EARLY = {"placement": SPLIT, "granularity": "sample"}
"""Training begins with what is there."""


def minibatches_are_slices_in_order_of_admission() -> None:
    work = replace(LONG, minibatches=2)
    check_minibatches(train(EARLY, work), work, in_order=True)


def minibatches_go_before_the_batch_is_closed() -> None:
    recorder = KeepAll()
    train(EARLY, replace(LONG, minibatches=2), recorder)
    serving = [span for span in recorder.spans if span.operation == "serve"]
    updates = [span for span in recorder.spans if span.operation == "optimizer_step"]
    early = [update for update in updates if any(s.step == update.step and s.end_s > update.end_s for s in serving)]
    assert early, "no update while the step generates"


def proximal_log_probs_come_before_the_first_update() -> None:
    recorder = KeepAll()
    needs = Needs(proximal_logprobs=True)
    train(EARLY, replace(LONG, needs=needs, minibatches=2, num_steps=3), recorder)
    of_actor = [span for span in recorder.spans if span.group == "actor/0"]
    for step in range(1, 4):
        mine = sorted((span for span in of_actor if span.step == step), key=lambda span: span.start_s)
        made = [span.operation for span in mine if span.operation in ("logprobs", "accumulate")]
        assert made == ["logprobs", "logprobs", "accumulate", "accumulate"], "of weights that were updated"


def slow_prompts_come_again() -> None:
    tail = {"kind": "tail_batching", "prompts": 1.1, "responses": 1, "max_age": 2}
    record = train({"tail": tail}, replace(LONG, num_steps=7))
    trained = {uid for step in record.trained for uid in step}
    seen = {entry.sample.prompt.uid for result in record.results[:3] for entry in result.ended}
    assert seen <= trained, "a prompt starved"


def every_prompt_is_asked_until_it_is_trained() -> None:
    tail = {"kind": "oversample", "prompts": 2}
    record = train({"tail": tail}, replace(LONG, num_prompts=64))
    assert sum(len(step) for step in record.trained) == 64, "a prompt was lost"


def placement_changes_no_sample() -> None:
    def lengths(fields: dict[str, object]) -> list[tuple[str, int, int]]:
        ended = [entry.sample for result in train(fields).results for entry in result.ended]
        return sorted((sample.prompt.uid, sample.key.index, sample.num_tokens) for sample in ended)

    others: list[dict[str, object]] = [{"placement": SPLIT, "granularity": "sample"}, {"dispatch": "longest_first"}]
    assert all(lengths({}) == lengths(other) for other in others), "other samples"


def the_hash_seed_changes_nothing() -> None:
    is_broken = mutations.EnginePool.resume is not RESUME
    code = "mutations.apply(mutations.sets_iterated())" if is_broken else ""
    told = [
        subprocess.run(
            [sys.executable, "-c", f"from tests.support import mutations, traces\n{code}\nprint(traces.of_partials())"],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert told[0] and told[0] == told[1], "another trace"


RESUME = mutations.EnginePool.resume


def pieces_change_no_update() -> None:
    samples = ragged_samples(6)

    def weights(pieces: list[list[Sample]]) -> torch.Tensor:
        config = TrainConfig(tokens_per_microbatch=10_000)
        engine = TrainEngine(tiny_model(), loss=sft_loss, optimizer=OptimizerConfig(lr=1e-3), config=config)
        for piece in pieces:
            engine.accumulate(piece)
        engine.optimizer_step()
        return torch.cat([parameter.detach().flatten() for parameter in engine.model.parameters()])

    torch.testing.assert_close(
        weights([samples]), weights([samples[:1], samples[1:]]), rtol=0, atol=1e-5, msg="the pieces show"
    )


@dataclass(frozen=True, kw_only=True)
class Rule:
    number: int
    holds: Callable[[], object]
    taken_out: Callable[[], mutations.Mutation]
    violation: str
    """Of the scenario, once the rule is taken out."""


STUCK = "nothing can go on|nothing is ready"
RULES = (
    Rule(number=1, holds=lambda: train({**STREAM, "max_staleness": 1}), taken_out=mutations.slots_at_consumption,
         violation="staler than allowed"),
    Rule(number=1, holds=filtered_groups_are_replaced, taken_out=mutations.no_slot_for_a_tombstone,
         violation=f"ended early|{STUCK}"),
    Rule(number=2, holds=lambda: train({**STREAM, "max_staleness": 1, "batching": "arrival"}),
         taken_out=mutations.no_deadlines, violation="staler than allowed"),
    Rule(number=3, holds=lambda: train({**PARTIAL, "max_staleness": 2, "rollout_budget": 10}),
         taken_out=mutations.suspended_for_ever, violation=STUCK),
    Rule(number=3, holds=due_partials_go_on, taken_out=mutations.not_resumed_when_due, violation="due is suspended"),
    Rule(number=3, holds=partials_go_on_at_a_publication, taken_out=mutations.not_resumed_at_a_publication,
         violation="its budget renewed"),
    Rule(number=4, holds=lambda: train({**PARTIAL, "max_staleness": 1}), taken_out=mutations.no_stall_rule,
         violation=r"nothing can go on.*\n.*waits:\n.* waits for .* since"),
    Rule(number=4, holds=the_last_granule_needs_no_stall, taken_out=mutations.full_granules_only, violation="stalled"),
    Rule(number=5, holds=wide_claims_get_their_devices, taken_out=mutations.one_device_at_a_time, violation=STUCK),
    Rule(number=5, holds=who_waits_reserves, taken_out=mutations.no_reservations, violation="starves"),
    Rule(number=5, holds=downstream_goes_first, taken_out=mutations.upstream_first, violation="upstream went first"),
    Rule(number=5, holds=only_rollout_is_preempted, taken_out=mutations.everybody_is_preempted,
         violation="is interrupted"),
    Rule(number=5, holds=lambda: train({}), taken_out=mutations.devices_before_the_granule, violation=STUCK),
    Rule(number=6, holds=a_draining_engine_starts_nothing, taken_out=mutations.new_sequences_with_old_weights,
         violation="staler than allowed"),
    Rule(number=6, holds=every_engine_swapped_before_training_goes_on, taken_out=mutations.swaps_not_awaited,
         violation="while an engine swapped"),
    Rule(number=6, holds=rolling_swaps_hold_no_training_up, taken_out=mutations.swaps_awaited,
         violation="waited for the engines"),
    Rule(number=7, holds=pieces_change_no_update, taken_out=mutations.a_denominator_for_each_piece,
         violation="the pieces show"),
    Rule(number=7, holds=minibatches_are_slices_in_order_of_admission, taken_out=mutations.minibatches_by_arrival,
         violation="not in order of admission"),
    Rule(number=7, holds=minibatches_are_slices_in_order_of_admission,
         taken_out=mutations.missing_groups_not_awaited, violation="not in order of admission"),
    Rule(number=7, holds=minibatches_go_before_the_batch_is_closed,
         taken_out=mutations.minibatches_wait_for_the_batch, violation="no update while"),
    Rule(number=7, holds=proximal_log_probs_come_before_the_first_update,
         taken_out=mutations.batches_not_awaited, violation="of weights that were updated"),
    Rule(number=7, holds=proximal_log_probs_come_before_the_first_update,
         taken_out=mutations.proximal_of_the_weights_so_far, violation="of weights that were updated"),
    Rule(number=7, holds=replaced_within_their_step, taken_out=mutations.replacements_for_later_steps,
         violation="staler than allowed|a batch is short|ended early"),
    Rule(number=8, holds=every_prompt_is_asked_until_it_is_trained, taken_out=mutations.slow_prompts_are_lost,
         violation="was lost|ended early"),
    Rule(number=8, holds=slow_prompts_come_again, taken_out=mutations.no_age_cap, violation="starved"),
    Rule(number=9, holds=placement_changes_no_sample, taken_out=mutations.noise_by_arrival, violation="other samples"),
    Rule(number=9, holds=the_hash_seed_changes_nothing, taken_out=mutations.sets_iterated, violation="another trace"),
)  # fmt: skip


def name(rule: Rule) -> str:
    return f"{rule.number}-{rule.taken_out.__name__}"


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_a_rule_holds_its_scenario_up(rule: Rule) -> None:
    rule.holds()


@pytest.mark.parametrize("rule", RULES, ids=name)
def test_without_the_rule_the_scenario_fails(rule: Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, what, instead in rule.taken_out():
        monkeypatch.setattr(owner, what, instead)
    with pytest.raises((AssertionError, HangError), match=rule.violation):
        rule.holds()


def test_every_rule_is_here() -> None:
    assert {rule.number for rule in RULES} == set(range(1, 10))


@pytest.mark.parametrize("kind", ["oversample", "tail_batching"])
def test_rounds_that_overlap_are_refused_because_they_would_break_a_run(kind: str) -> None:
    with pytest.raises(UserError, match="max_staleness 0"):
        Schedule.parse({"tail": kind, "max_staleness": 2})
    with pytest.raises((AssertionError, HangError, KeyError)):
        for seed in range(60):
            rng = random.Random(seed)
            work = random_workload(rng)
            fields = random_schedule(rng, work.num_devices, synchronous=True).model_dump()
            fields |= {"sync_every": 1, "tail": {"kind": kind, "prompts": 2, "responses": 1.25}}
            unchecked = Schedule.parse(fields).model_copy(update={"max_staleness": 2.0})
            check(simulate(unchecked, work), work, unchecked.staleness_bound)
