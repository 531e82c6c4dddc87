"""Complete runs of the quick start at toy size keep the promises to a user."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer, BloomConfig

from interlace.algorithms.grpo import GRPO
from interlace.core.errors import InterlaceError, UserError
from interlace.core.training import LossInputs, LossOutputs
from interlace.models.tiny import build_tokenizer
from interlace.observe.progress import QuietProgress
from interlace.observe.run_folder import RunFolder
from interlace.runtime.watchdog import Watchdog
from tests.support.chrome_trace import check_trace, counters_of, events_of
from tests.support.training import SMALL, equal_weights, final_weights, metrics, run, samples

NAMED = (
    "step", "version", "reward/mean", "response_length/mean", "response_length/max", "actor/loss", "actor/entropy",
    "actor/grad_norm", "actor/clip_fraction", "actor/kl", "timing_s/step", "timing_s/rollout", "timing_s/reward",
    "timing_s/reference", "timing_s/train", "timing_s/weight_sync", "perf/throughput", "sched/staleness_mean",
    "sched/staleness_max", "sched/bubble", "sched/oldest_wait_s", "perf/time_left_s",
)  # fmt: skip
ROW = (
    "step", "group", "uid", "index", "prompt", "response", "token_ids", "num_tokens", "reward", "version_min",
    "version_max", "event", "scored",
)  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds an uninterrupted run called `whole`."""
    root = tmp_path_factory.mktemp("runs")
    report = run(root, "whole")
    assert report.done_steps == 4 and not report.was_stopped
    assert report.before is not None and report.after is not None
    return root


def test_a_run_leaves_what_the_manual_says(root: Path) -> None:
    folder = RunFolder(path=root / "whole")
    lines = [json.loads(line) for line in folder.metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert not [name for name in NAMED if name not in lines[0]]
    assert lines[-1]["version"] == 4
    trace = events_of(folder.timeline)
    check_trace(trace)
    assert {"rollout.serve", "actor.accumulate"} <= {event["name"] for event in trace}
    assert sum(event["ph"] == "s" for event in trace) == 4 * 4, "an arrow for each group"
    assert max(counters_of(trace)["rollout/0 KV use"]) > 0
    assert len(samples(root, "whole")) == 4 * 16


def test_a_transcript_holds_one_object_a_sample(root: Path) -> None:
    row = samples(root, "whole")[0]
    assert tuple(row) == ROW
    assert row["event"] == "trained" and row["num_tokens"] == len(row["token_ids"])  # type: ignore[arg-type]


def test_a_checkpoint_is_a_hugging_face_folder(root: Path) -> None:
    checkpoint = next((root / "whole" / "checkpoints").iterdir())
    model, tokenizer = AutoModelForCausalLM.from_pretrained(checkpoint), AutoTokenizer.from_pretrained(checkpoint)
    assert model.get_input_embeddings().num_embeddings >= len(tokenizer)


def test_two_identical_runs_are_identical_but_for_the_clock(root: Path) -> None:
    run(root, "again")
    assert metrics(root, "again") == metrics(root, "whole")
    assert samples(root, "again") == samples(root, "whole")
    assert equal_weights(final_weights(root, "again"), final_weights(root, "whole"))


def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(root: Path) -> None:
    assert run(root, "stopped", stop_after=2).was_stopped
    assert run(root, "stopped", resume=True).done_steps == 4
    assert metrics(root, "stopped") == metrics(root, "whole")
    assert samples(root, "stopped") == samples(root, "whole")
    assert equal_weights(final_weights(root, "stopped"), final_weights(root, "whole"))


def test_a_run_without_a_step_left_keeps_its_timeline(root: Path) -> None:
    timeline = RunFolder(path=root / "whole").timeline
    before = timeline.read_bytes()
    assert run(root, "whole", resume=True).done_steps == 4
    assert timeline.read_bytes() == before


@pytest.mark.parametrize(
    ("damaged", "reason"),
    [
        ("state.json", "state.json with 0 of"),
        ("optimizer/rank-0-of-1.safetensors", "rank-0-of-1.safetensors with 0 of"),
        ("optimizer/.metadata", "in the format of an earlier version, which can run code"),
    ],
)
def test_a_damaged_checkpoint_is_named(root: Path, damaged: str, reason: str) -> None:
    name = f"damaged{Path(damaged).name}"
    shutil.copytree(root / "whole", root / name)
    (root / name / "checkpoints" / "step_4" / damaged).write_text("")
    with pytest.raises(UserError, match=reason):
        run(root, name, ["steps=5"], resume=True)


@pytest.mark.parametrize("algorithm", ["ppo", "prime"])
def test_a_run_with_every_role_resumes_as_if_it_had_not_stopped(root: Path, algorithm: str) -> None:
    overrides = [f"algorithm={algorithm}", "algorithm.kl_coefficient=0.1", "critic.optimizer.lr=1e-3", "steps=3"]
    plain = [override for override in SMALL if not override.startswith("algorithm")]
    run(root, f"{algorithm}-whole", overrides, base=plain)
    run(root, f"{algorithm}-stopped", overrides, base=plain, stop_after=1)
    run(root, f"{algorithm}-stopped", overrides, base=plain, resume=True)
    assert metrics(root, f"{algorithm}-stopped") == metrics(root, f"{algorithm}-whole")
    assert equal_weights(final_weights(root, f"{algorithm}-stopped"), final_weights(root, f"{algorithm}-whole"))


def test_a_stopped_asynchronous_run_trains_on_the_same_prompts_none_twice(root: Path) -> None:
    overrides = ["schedule=one-step-off"]
    run(root, "async-whole", overrides)
    run(root, "async", overrides, stop_after=2)
    run(root, "async", overrides, resume=True)

    def trained(name: str) -> list[tuple[object, ...]]:
        rows = [row for row in samples(root, name) if row["event"] == "trained"]
        return sorted((row["step"], row["uid"], row["index"]) for row in rows)

    assert trained("async") == trained("async-whole")


def test_one_step_off_lags_one_version(root: Path) -> None:
    run(root, "lagging", ["schedule=one-step-off"])
    assert [line["sched/staleness_max"] for line in metrics(root, "lagging")] == [0, 1, 1, 1]


def flaky(prompt: str, response: str, answer: str, metadata: object) -> float:
    if len(response) % 3 == 0:
        raise RuntimeError(f"no score for {len(response)} characters")
    return float(len(response))


def test_a_stall_is_resolved_at_once(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all that is left was cut off, and the trainer waits for it."""
    monkeypatch.setattr(Watchdog, "LOOK_EVERY_S", 1e6)
    report = run(root, "cut", ["schedule=kimi-partial-rollout", "schedule.rollout_budget=3"])
    assert report.done_steps == 4
    assert max(row["num_tokens"] for row in samples(root, "cut")) > 6  # type: ignore[type-var]


def test_a_reward_that_raises_fails_its_sample_not_the_run(root: Path) -> None:
    reward = ["reward.name=tests.e2e.test_training:flaky", "reward.tag=null", "reward.answer_format=text"]
    heard = Said()
    report = run(root, "flaky", [*reward, "steps=2"], progress=heard)
    assert report.done_steps == 2
    failed = [row for row in samples(root, "flaky") if row["event"] == "failed"]
    assert failed and all("no score for" in str(row["reason"]) for row in failed)
    counted = sum(line["samples/failed"] for line in metrics(root, "flaky"))
    assert counted == len(failed)
    told = [line for line in heard.lines if "no score for" in line]
    assert [line.partition(":")[0] for line in told] == ["evaluation before", "step 1", "evaluation after"]
    first = sum(row["step"] == 1 for row in failed)
    assert told[1].startswith(f"step 1: {first} of ") and str(root / "flaky" / "samples") in told[1]


def unreachable(prompt: str, response: str, answer: str, metadata: object) -> float:
    raise ConnectionError("the judge does not answer")


def test_a_run_whose_first_samples_all_fail_ends_there(root: Path) -> None:
    reward = ["reward.name=tests.e2e.test_training:unreachable", "reward.tag=null", "reward.answer_format=text"]
    with pytest.raises(InterlaceError, match=r"a whole step, all failed, .*the judge does not answer"):
        run(root, "unreachable", reward)
    assert metrics(root, "unreachable") == []
    assert {row["event"] for row in samples(root, "unreachable")} == {"failed"}


_scored: list[str] = []


def interrupted(response: str) -> float:
    _scored.append(response)
    if len(_scored) == 12:
        raise ConnectionError("the judge does not answer")
    return float(len(response))


def test_a_pause_of_admission_and_its_end_are_told(root: Path) -> None:
    reward = ["reward.name=tests.e2e.test_training:interrupted", "reward.tag=null", "reward.answer_format=text"]
    heard = Said()
    few = ["evaluation.num_prompts=1", "evaluation.samples_per_prompt=0", "recovery.failures_in_a_row=1"]
    run(root, "interrupted", [*reward, *few, "recovery.probe_s=0.05", "steps=2"], progress=heard)
    assert [line for line in heard.lines if "admitted" in line] == [
        "1 attempts in a row failed (cause: network): no prompt is admitted until an attempt succeeds",
        "an attempt succeeded: prompts are admitted again",
    ]


def parted(prompt: str, response: str, answer: str, metadata: object) -> dict[str, float]:
    return {"right": float(response == answer), "short": -0.01 * len(response)}


def test_a_run_says_once_which_weights_are_of_no_part(root: Path) -> None:
    reward = ["reward.name=tests.e2e.test_training:parted", "reward.tag=null", "reward.answer_format=text"]
    heard = Said()
    shaping = ["reward.shaping.weights={right: 2, brief: 3}", "reward.shaping.length_weight=0"]
    run(root, "idle-weights", [*reward, *shaping, "steps=2"], progress=heard)
    (line,) = [line for line in heard.lines if "reward.shaping.weights" in line]
    assert line.startswith("step 1: reward.shaping.weights names brief,") and line.endswith("Parts are: right, short")


def test_a_run_says_once_that_engines_got_nothing_new(root: Path) -> None:
    reward = ["reward.name=tests.support.reward_functions:length", "reward.tag=null", "reward.answer_format=text"]
    heard = Said()
    run(root, "still", [*reward, "steps=3", "optimizer.lr=1e-30"], progress=heard)
    (line,) = [line for line in heard.lines if "to the bit the one before" in line]
    assert line.startswith("step 1: the actor was updated (gradient norm")
    run(root, "moving", [*reward, "steps=2"], progress=heard)
    assert len([line for line in heard.lines if "to the bit the one before" in line]) == 1


def praise(prompt: str, response: str, answer: str, metadata: object) -> bool:
    return True


def test_what_a_form_costs_makes_no_answer_wrong(root: Path) -> None:
    reward = ["reward.name=tests.e2e.test_training:praise", "reward.tag=null", "reward.answer_format=text"]
    report = run(root, "penalized", [*reward, "reward.shaping.repetition_ngram=1", "steps=1"])
    assert metrics(root, "penalized")[0]["reward/repetition"] < 0
    assert report.before is not None
    assert (report.before.greedy_accuracy, report.before.sampled_accuracy) == (1, 1)


def test_groups_of_a_resumed_run_are_numbered_on(root: Path) -> None:
    """Also where some were dropped before, and took numbers too."""
    reward = ["reward.name=tests.e2e.test_training:flaky", "reward.tag=null", "reward.answer_format=text"]
    dropping = [*reward, "samples_per_prompt=2", "steps=3"]
    run(root, "dropping-whole", dropping)
    run(root, "dropping", dropping, stop_after=1)
    run(root, "dropping", dropping, resume=True)
    assert {row["event"] for row in samples(root, "dropping")} == {"trained", "filtered", "failed"}
    assert samples(root, "dropping") == samples(root, "dropping-whole")


def test_a_length_reward_compares_the_responses_of_a_group(root: Path) -> None:
    run(root, "length", ["reward.shaping.length_weight=2", "steps=1"])
    line, rows = metrics(root, "length")[0], samples(root, "length")
    assert line["reward/mean"] == pytest.approx(line["reward/task"] + line["reward/length"])
    for uid in {row["uid"] for row in rows}:
        group = [(int(str(row["num_tokens"])), float(str(row["reward"]))) for row in rows if row["uid"] == uid]
        low, high = min(length for length, _ in group), max(length for length, _ in group)
        for length, reward in group:
            part = 1 - 2 * (length - low) / (high - low) if low < high else 0.0
            assert reward == pytest.approx(5 + part if reward > 0 else -5 + min(0.0, part))


def test_the_reference_may_be_another_model(root: Path) -> None:
    kl = ["algorithm.kl_coefficient=0.1", "steps=1"]
    run(root, "own-reference", kl)
    run(root, "other-reference", [*kl, "reference.model.path=tiny:micro", "reference.model.seed=5"])
    own, other = metrics(root, "own-reference")[0], metrics(root, "other-reference")[0]
    assert own["actor/ref_kl"] < 1e-3 < other["actor/ref_kl"]


def test_an_algorithm_with_a_reference_runs_from_the_same_flow(root: Path) -> None:
    run(root, "reference", ["algorithm.kl_coefficient=0.1", "steps=2"])
    lines = [json.loads(line) for line in (root / "reference" / "metrics.jsonl").read_text().splitlines()]
    assert all(line["timing_s/reference"] > 0 for line in lines)


class Said(QuietProgress):
    """Keeps the lines that stay."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str) -> None:
        self.lines.append(text)


def test_a_run_says_where_its_micro_batches_are_padded(root: Path) -> None:
    tokenizer = build_tokenizer(64)
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=16, n_layer=1, n_head=2, pad_token_id=0, eos_token_id=1)
    for part in (AutoModelForCausalLM.from_config(config), tokenizer):
        part.save_pretrained(root / "bloom")
    padded, packed = Said(), Said()
    unwarmed = [override for override in SMALL if not override.startswith(("warmup", "algorithm"))]
    small = ["steps=1", "prompts_per_step=2", "sampling.max_new_tokens=2", "evaluation.samples_per_prompt=0"]
    run(root, "padded", [f"model.path={root / 'bloom'}", "warmup=null", *small], base=unwarmed, progress=padded)
    run(
        root,
        "packed",
        ["algorithm=ppo", "algorithm.kl_coefficient=0.1", "warmup=null", *small],
        base=unwarmed,
        progress=packed,
    )
    (line,) = [line for line in padded.lines if line.startswith("actor: ")]
    assert line.startswith("actor: micro-batches are padded"), line
    assert line.endswith("BloomForCausalLM does not call transformers' attention interface"), line
    names = ("actor", "critic", "reference")
    assert {f"{name}: micro-batches are packed, without padding" for name in names} <= set(packed.lines)


class Astray(GRPO):
    """Its loss is no number."""

    def loss(self, inputs: LossInputs) -> LossOutputs:
        outputs = super().loss(inputs)
        return replace(outputs, loss_T=outputs.loss_T * float("nan"))


@pytest.mark.parametrize(
    ("role", "overrides"),
    [
        ("actor", [f"algorithm={__name__}:Astray"]),
        ("process_reward", ["algorithm=prime", "critic.process_reward_scale=1e38"]),
    ],
)
def test_a_run_says_once_that_its_minibatches_are_lost(root: Path, role: str, overrides: list[str]) -> None:
    progress, name = Said(), f"astray-{role}"
    with pytest.raises(InterlaceError, match=f"all updates of the {role} were dropped"):
        run(root, name, [*overrides, "steps=2"], progress=progress)
    (line,) = [line for line in progress.lines if f"the {role}'s minibatches" in line]
    assert line.startswith("step 1: 2 of ") and "not a finite number" in line
    assert [line[f"{role}/skipped_minibatches"] for line in metrics(root, name)] == [2, 2]


def test_a_learning_rate_beyond_all_bounds_ends_the_run_with_its_first_weights(root: Path) -> None:
    run(root, "sound", ["steps=1", "optimizer.lr=1e-30"])
    with pytest.raises(InterlaceError, match=r"step 3: the last 6 updates of the actor were dropped.*optimizer\.lr"):
        run(root, "explodes", ["steps=8", "optimizer.lr=1e30", "optimizer.max_failed_updates=5"])
    assert [line["actor/failed_updates_in_a_row"] for line in metrics(root, "explodes")] == [2, 4, 6]
    assert equal_weights(final_weights(root, "explodes"), final_weights(root, "sound"))


def test_a_resumed_run_counts_the_failed_updates_before_it(root: Path) -> None:
    settings = ["steps=8", "optimizer.lr=1e30", "optimizer.max_failed_updates=5"]
    with pytest.raises(InterlaceError, match="all updates of the actor were dropped"):
        run(root, "failing", settings, stop_after=2)
    with pytest.raises(InterlaceError, match="step 3: the last 6 updates of the actor were dropped"):
        run(root, "failing", settings, resume=True)
    assert [line["actor/failed_updates_in_a_row"] for line in metrics(root, "failing")] == [2, 4, 6]
