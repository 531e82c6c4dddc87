"""Unusable settings are refused before work starts, and derived values are computed correctly."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from interlace.core.errors import UserError
from interlace.core.types import Prompt, Sample, SampleKey, Segment
from interlace.engines.train.packing import split_samples
from interlace.models.tiny import build_tokenizer
from interlace.run.clusters.base import back_end
from interlace.run.recipe.check import Derived, check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.run.recipe.memory import forecast_run, largest_microbatch, working_bytes
from tests.support.mixture import save_mixture

TEXT = """
model: tiny:micro
task:
  reasoning_gym:
    name: number_sorting
    parameters: {min_numbers: 3, max_numbers: 5, min_decimals: 0, max_decimals: 0, min_value: 0, max_value: 9}
    train_size: 12
    heldout_size: 6
  format: {template: "{original_numbers}{direction}", replace: {".0": "", ascending: "<", descending: ">"}}
reward: {name: reasoning_gym, tag: answer, answer_format: characters, workers: 0}
cluster: {devices: "cpu:2"}
steps: 6
prompts_per_step: 4
samples_per_prompt: 2
minibatches: 2
sampling: {max_new_tokens: 8}
rollout: {max_running: 8, max_tokens: 512}
"""
VERDICTS = ("reward.correct=1", "reward.incorrect=0")
Check = Callable[..., Derived]


def test_a_recipe_without_a_reward_is_read_and_refused_while_episodes_bring_none(check: Check, tmp_path: Path) -> None:
    without = tmp_path / "without.yaml"
    without.write_text("".join(line for line in TEXT.splitlines(keepends=True) if not line.startswith("reward")))
    assert load_recipe(str(without), []).reward is None
    some = "episode={name: second_guess, column: kind, others: {t: single_turn}}"
    for refused in (
        lambda: check_recipe(load_recipe(str(without), [])),
        lambda: check("reward=null"),
        lambda: check_recipe(load_recipe(str(without), [some])),  # the rows of one episode would all fail
    ):
        with pytest.raises(UserError, match=r"has no `reward`, and episode 'single_turn' .* Set reward=exact"):
            refused()


@pytest.fixture
def check(tmp_path: Path) -> Check:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    return lambda *overrides: check_recipe(load_recipe(str(file), overrides))


def test_the_derived_numbers(check: Check) -> None:
    derived = check("schedule.sync_every=4")
    assert (derived.num_train_prompts, derived.num_heldout_prompts) == (12, 6)
    assert (derived.samples_per_step, derived.samples_per_minibatch) == (8, 4)
    assert (derived.num_updates, derived.num_versions) == (12, 1)
    assert check("epochs=3").num_updates == 36
    late = check("schedule=verl-fully-async-c")
    assert (late.staleness_bound, late.steps_ahead) == (1, 2.0), "half of a version of four steps"
    assert derived.max_prompt_tokens == 6  # five digits and the direction, a token each
    assert derived.max_tokens_per_step == 8 * (6 + 8)


def test_an_adapter_shares_its_base_with_the_reference_where_both_are(check: Check) -> None:
    lora = ("algorithm.kl_coefficient=0.1", "actor.lora.rank=4", "actor.lora.target_modules=[q_proj]")
    shared = check(*lora)
    memory = {worker.worker: worker for worker in shared.memory}
    assert list(memory) == ["rollout/0", "rollout/1", "actor/0"]
    assert shared.num_lora_parameters == 3 * 4 * (64 + 64)
    assert memory["actor/0"].num_bytes == 4 * shared.num_parameters + 4 * 4 * shared.num_lora_parameters
    assert "also the reference" in memory["actor/0"].how
    apart = check(*lora, "schedule.placement.actor=0", "schedule.placement.reference=1")
    assert [worker.worker for worker in apart.memory] == ["rollout/0", "rollout/1", "reference/0", "actor/0"]
    other = check(*lora, "reference.model.path=tiny:micro", "reference.model.seed=3")
    assert "reference/0" in [worker.worker for worker in other.memory]


def test_an_adapter_for_a_layer_that_is_not_there_is_refused(check: Check) -> None:
    with pytest.raises(UserError, match=r"no linear layer 'query'.*It has q_proj"):
        check("actor.lora.target_modules=[query]")


def test_the_memory_forecast_is_what_the_workers_hold(check: Check) -> None:
    from interlace.engines.rollout import NativeConfig, NativeEngine
    from interlace.models.config import ModelConfig
    from interlace.models.loading import load_model

    derived = check("algorithm.kl_coefficient=0.1")
    found = {worker.worker: worker.num_bytes for worker in derived.memory}
    assert list(found) == ["rollout/0", "rollout/1", "reference/0", "reference/1", "actor/0"]
    model = load_model(ModelConfig(path="tiny:micro")).model
    weights = sum(parameter.numel() * 4 for parameter in model.parameters())
    assert derived.num_parameters * 4 == weights == found["reference/0"] == found["actor/0"] / 4
    memory = NativeEngine(model, config=NativeConfig(max_running=8, max_tokens=512)).memory()
    assert found["rollout/0"] == pytest.approx(memory.weights + memory.kv_cache, rel=0.05)


def test_what_is_trained_is_forecast_in_float32(check: Check) -> None:
    full, half = (
        {worker.worker: worker.num_bytes for worker in check(f"model.dtype={name}").memory}
        for name in ("float32", "bfloat16")
    )
    assert half["actor/0"] == full["actor/0"] and half["rollout/0"] == full["rollout/0"] / 2


def test_roles_that_the_algorithm_does_not_need_are_not_in_the_forecast(check: Check) -> None:
    assert {worker.worker.partition("/")[0] for worker in check().memory} == {"rollout", "actor"}
    assert "critic/0" in {worker.worker for worker in check("algorithm=ppo").memory}


def test_ranks_share_what_a_trained_worker_holds(check: Check) -> None:
    whole, shared = ({worker.worker: worker for worker in check(*more).memory} for more in ((), ("actor.ranks=2",)))
    assert shared["actor/0"].num_bytes == whole["actor/0"].num_bytes / 2
    assert shared["actor/0"].how == "1/2 of weights, gradients, two moments, in float32"
    assert shared["rollout/0"].num_bytes == whole["rollout/0"].num_bytes


def test_ranks_that_keep_what_they_gather_need_room_for_it(check: Check) -> None:
    given_up, kept = (
        next(worker for worker in check("actor.ranks=2", *more).memory if worker.worker == "actor/0")
        for more in ((), ("actor.reshard=false",))
    )
    weights_and_gradient = 2 * given_up.num_bytes * 2 / 4
    assert kept.num_bytes == given_up.num_bytes
    assert kept.transient_bytes - given_up.transient_bytes == weights_and_gradient


@pytest.mark.parametrize(("budget", "largest"), [(10, 14), (30, 30), (8192, 4 * 2 * 14)])
def test_the_largest_micro_batch_that_occurs_is_what_check_and_launch_reckon_with(
    check: Check, tmp_path: Path, budget: int, largest: int
) -> None:
    """A sample is of at most 6 tokens of prompt and 8 of response, and is not split."""
    setting = f"tokens_per_microbatch={budget}"
    recipe = load_recipe(str(tmp_path / "mine.yaml"), [setting])
    assert largest_microbatch(recipe, longest_prompt=6) == largest
    prompts = [Prompt(uid=f"{n}", token_ids=np.full(6, n, np.int32), text="", answer="") for n in range(4)]
    response = Segment(token_ids=np.zeros(8, np.int32))
    samples = [Sample(key=SampleKey(n, 0), prompt=prompts[n // 2], segments=(response,)) for n in range(8)]
    batches = split_samples(samples, budget, padded=True)
    assert largest - 14 < max(sum(samples[index].num_total_tokens for index in batch) for batch in batches) <= largest
    derived = check(setting)
    devices = back_end(recipe.cluster).find_devices(recipe.cluster)
    launched = working_bytes(forecast_run(recipe, devices, derived.max_prompt_tokens).workers)
    assert launched == {worker.worker.partition("/")[0]: worker.transient_bytes for worker in derived.memory}
    assert launched["actor"] == pytest.approx(
        largest * check("tokens_per_microbatch=14").memory[-1].transient_bytes / 14
    )


THREE = ["cluster.devices=cpu:3", "schedule.placement.rollout={devices: all, devices_per_instance: 3}"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["actor.ranks=3"], r"actor.ranks=3, but .* gives it 2 .*\(cpu:0, cpu:1\).* Set actor.ranks to 1 or 2"),
        (["actor.ranks=2", "schedule.placement.actor=0"], r"actor.ranks=2, but .* gives it 1 .* Set actor.ranks to 1,"),
        (["rollout.tensor_parallel_size=2"], r"computes on 2. Set devices_per_instance to 2"),
        ([*THREE, "rollout.tensor_parallel_size=3"], r"rollout.tensor_parallel_size=3, but .*num_attention_heads=4"),
        (["actor.tensor_parallel=2", "schedule.placement.actor=0"], r"actor.ranks=2, but .* Set actor.ranks to 1,"),
        (["actor.tensor_parallel=2", "actor.ranks=3"], r"actor: 3 ranks cannot .* Set actor.ranks .* multiple of 2"),
        (["actor.tensor_parallel=3", "cluster.devices=cpu:3"], r"tensor_parallel=3, but .*num_attention_heads=4"),
        (["actor.tensor_parallel=2", "actor.compile=true"], r"compile with tensor_parallel=2: .* Leave compile out"),
        (["critic.ranks=2", "cluster.devices=cpu:3"], r"critic.ranks=2, but .* 3 of .* Set critic.ranks to 1 or 3"),
    ],
)
def test_ranks_that_do_not_fit_their_devices_are_refused(check: Check, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(*overrides)


def test_an_evaluation_takes_no_more_prompts_than_asked_for(check: Check) -> None:
    assert check("evaluation.num_prompts=2").num_heldout_prompts == 2
    assert check("task.reasoning_gym.heldout_size=0").num_heldout_prompts == 0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["samples_per_prompt=1"],
            "samples_per_prompt=1 leaves algorithm 'grpo' nothing to learn from.*2 or more.*: ppo, ",
        ),
        (
            ["algorithm=remax", "episode={name: tools, tools: [calculator]}"],
            "compares samples with a greedy response .* 'tools' does not make",
        ),
        (["algorithm=maxrl"], r"'maxrl' takes rewards of 0 or more.* reward.incorrect=-5 a.* get -5. .*ect=1 .*=0,"),
        (["algorithm=maxrl", *VERDICTS, "reward.shaping.repetition_ngram=2"], r"to 1 taken off by .* may get -1\."),
        (["minibatches=3"], "prompts_per_step=4 cannot be cut into minibatches=3.*1, 2, 4.*multiple of 3"),
        (["minibatches=8"], "prompts_per_step=4 cannot be cut into minibatches=8"),
        (["schedule.placement.actor=2"], "placement.actor = '2' names device 2, but the pool has 2"),
        (["schedule.placement.critic=5"], "placement.critic = '5' names device 5"),
        (["schedule.placement.rollout=gpu:all"], "placement.rollout = 'gpu:all': the cluster has no pool 'gpu'"),
        (["schedule=one-step-off", "cluster.devices=cpu:1"], "is no whole device of 1"),
        (["cluster.devices=tpu:2"], "cluster.devices = 'tpu:2'"),
        (["sampling.top_k=5"], "top_k=5 draws from a distribution that training cannot recompute"),
        (["sampling.temperature=0"], "temperature=0 is greedy"),
        (["reward=exactt"], "unknown reward 'exactt'. Did you mean 'exact'"),
        (["logging.loggers=[tensorbord]"], "unknown logger 'tensorbord'. Did you mean 'tensorboard'"),
        (["logging.trace_steps=[2,99]"], r"trace_steps=\[2, 99\], but the run ends with step \d+"),
        (["logging.trace_steps=[3,2]"], r"\[3, 2\] is no range of steps"),
        (["task.reasoning_gym.name=number_sortin"], "unknown reasoning_gym dataset 'number_sortin'"),
        (["task.format.template={x: 1}"], r"task\.format\.template = "),
        (["task.format.template='{x}'"], "has no column 'x'"),
        (
            ["evaluation.num_prompts=7"],
            "the task holds out 6 .* or raise task.reasoning_gym.heldout_size",
        ),
        (
            ["eval_every=1", "task.reasoning_gym.heldout_size=0"],
            r"out no prompts\. Set task\.reasoning_gym\.heldout",
        ),
        (["warmup.steps=1", "warmup.demonstrations.style=sorting"], "unknown demonstration style 'sorting'"),
        (["sampling.max_new_tokens=2000"], r"more than the model's context of 1024. Lower max_new_tokens\.$"),
        (["rollout.max_tokens=10"], "is 14; with rollout.max_tokens=10 .* KV cache holds 0 for one.* to 16 or more"),
        (["rollout.max_tokens=1000000000"], "rollout/0 needs about .* GiB .weights . KV cache"),
        (["model=tiny:huge"], "unknown tiny model 'huge'"),
        (
            ["recovery.memory_checkpoint_every=1", "cluster={backend: ray, address: auto}"],
            "cluster.address = 'auto' may run on other machines",
        ),
        (
            ["optimizer={schedule: linear, total_steps: 3}", "steps=4"],
            "the learning rate is 0 from then on, .* up to 8 updates, .* Set optimizer.total_steps to 8, or optimizer",
        ),
        (
            ["algorithm=ppo", "critic.optimizer={schedule: cosine, total_steps: 3}", "steps=4"],
            "critic.optimizer.total_steps = 3: the learning rate is 0",
        ),
        (
            ["algorithm=prime", "reward.correct=0.5", "reward.incorrect=0"],
            "critic.success_reward=0.5: .* does not separate right from wrong ones",
        ),
        (
            ["algorithm=prime", *VERDICTS, "critic.success_reward=1"],
            r"reward.correct=1, reward.incorrect=0 it does not separate .* Set it between the two\.",
        ),
        (
            ["reward.shaping.overlong_limit=8", "sampling.max_new_tokens=8"],
            "takes nothing off a response of up to 8 tokens.* Set overlong_limit=8 with an overlong_buffer",
        ),
        (["reference.model=tiny:micro"], "asks for no reference"),
        (
            ["algorithm={name: distill, signal: top_k, teacher_top_k: 100000}", "reference.model=tiny:small"],
            r"teacher_top_k=100000 is more than the \d+ tokens",
        ),
        (["reference.model=tiny:huge", "algorithm.kl_coefficient=0.1"], "unknown tiny model 'huge'"),
    ],
)
def test_what_cannot_work_is_refused(check: Check, overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check(*overrides)


def test_the_learning_rate_of_a_warm_up_may_fall_to_0_at_its_first_measurement(check: Check) -> None:
    fall = "warmup.optimizer={schedule: cosine, total_steps: 4}"
    warmup = ["warmup.demonstrations.style=sorting_habits", "warmup.until={accuracy: 0.5, max_steps: 20}", fall]
    check("warmup.steps=4", *warmup)
    with pytest.raises(UserError, match=r"warmup.optimizer.total_steps = 4: .* up to 5 updates"):
        check("warmup.steps=5", *warmup)


def test_a_penalty_may_make_a_right_response_count_as_wrong_for_a_process_reward_model(check: Check) -> None:
    """Most right responses get no penalty, and the penalty of others is the user's intent."""
    check("algorithm=prime", *VERDICTS, "reward.shaping={overlong_limit: 8, overlong_buffer: 4}")


def test_an_algorithm_for_rewards_of_0_or_more_takes_what_may_be_so(check: Check) -> None:
    check("algorithm=maxrl", *VERDICTS)
    check("algorithm=maxrl", "reward.name=tests.support.reward_functions:length", "reward.tag=null")
    with pytest.raises(UserError, match="a response may get -5"):
        check("algorithm=maxrl", "reward.name=tests.support.reward_functions:length")


def test_a_response_that_the_kv_cache_holds_is_one_that_the_engine_serves(check: Check) -> None:
    from interlace.engines.rollout import NativeConfig, NativeEngine, SamplingParams
    from interlace.models.config import ModelConfig
    from interlace.models.loading import load_model

    check("sampling.max_new_tokens=58", "rollout.max_tokens=70")
    with pytest.raises(UserError, match=r"that is 65; with rollout.max_tokens=70 .* holds 64 .* to 128 or more"):
        check("sampling.max_new_tokens=59", "rollout.max_tokens=70")
    check("sampling.max_new_tokens=59", "rollout.max_tokens=80", "rollout.kv=pages")
    engine = NativeEngine(
        load_model(ModelConfig(path="tiny:micro")).model, config=NativeConfig(max_running=2, max_tokens=70)
    )
    (served,) = engine.generate([range(6)], SamplingParams(max_new_tokens=58))
    assert len(served.token_ids) == 58
    with pytest.raises(UserError, match="which holds 64 for one sequence"):
        engine.generate([range(6)], SamplingParams(max_new_tokens=59))


def test_a_critic_of_a_model_that_transformers_has_no_head_for_is_refused(check: Check, tmp_path: Path) -> None:
    from transformers import OPTConfig

    tokenizer = build_tokenizer(64)
    sizes = {"hidden_size": 8, "word_embed_proj_dim": 8, "ffn_dim": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    tokenizer.save_pretrained(tmp_path)
    OPTConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes).save_pretrained(tmp_path)
    check(f"model.path={tmp_path}")
    with pytest.raises(UserError, match="OPTForCausalLM has no value head: use an algorithm without a critic"):
        check(f"model.path={tmp_path}", "algorithm=ppo")


def test_a_logger_whose_package_is_not_installed_is_refused(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "trackio", None)  # as if it were not there
    monkeypatch.delitem(sys.modules, "interlace.observe.loggers.trackio", raising=False)
    with pytest.raises(UserError, match="logger 'trackio' needs the package 'trackio': pip install trackio"):
        check("logging.loggers=[trackio]")


def test_a_warm_up_that_cannot_serve_the_prompts_is_refused(check: Check, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    with pytest.raises(UserError, match=r"is no prompt of reasoning_gym's number_sorting.*warmup=null"):
        check(f"task={rows}", "reward=exact", "warmup.steps=1", "warmup.demonstrations.style=sorting_habits")


def test_a_reward_that_cannot_score_the_prompts_is_refused(check: Check, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    with pytest.raises(UserError, match="the prompts come from another source"):
        check(f"task={rows}")


def test_eight_bits_need_a_correction(check: Check, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("interlace.engines.cpu.int8.check_processor", lambda: None)
    with pytest.raises(UserError, match=r"weights=int8 samples from another .*off_policy.correction=truncate"):
        check("rollout.weights=int8")
    with pytest.raises(UserError, match=r"weights.codec=int8 samples from another .*or weights.codec=raw"):
        check("weights.codec=int8")
    corrected = ["algorithm.off_policy.proximal=recomputed", "algorithm.off_policy.correction=truncate"]
    check("rollout.weights=int8", *corrected)
    with pytest.raises(UserError, match=r"weights=int8 is for the C\+\+ decoder"):
        check("rollout.weights=int8", "rollout.compile_decoder=false", *corrected)
    with pytest.raises(UserError, match=r"LlamaForCausalLM in bfloat16 is served otherwise here"):
        check("rollout.weights=int8", "model.dtype=bfloat16", *corrected)


def test_ranks_that_share_rows_need_heads_to_share(check: Check) -> None:
    with pytest.raises(UserError, match=r"tensor_parallel x actor\.context_parallel=.*cannot be shared out evenly"):
        check("actor.tensor_parallel=2", "actor.context_parallel=4", "cluster.devices=cpu:8")
    assert check("actor.context_parallel=2", "cluster.devices=cpu:8").num_updates


def test_experts_are_dealt_out_where_there_are_some(check: Check, tmp_path: Path) -> None:
    mixture, eight = f"model={save_mixture(tmp_path / 'even')}", "cluster.devices=cpu:8"
    odd = f"model={save_mixture(tmp_path / 'odd', moe_intermediate_size=9)}"
    for overrides, message in (
        (["actor.expert_parallel=2"], r"expert_parallel=2, but .* has no layers of experts"),
        ([mixture, "actor.expert_parallel=3", "cluster.devices=cpu:3"], r"=3, but .* has 4 experts a layer"),
        ([mixture, "actor.expert_parallel=2", "actor.ranks=1"], r"1 ranks .*expert_parallel=2.* multiple of 2"),
        ([mixture, "actor.expert_parallel=2", "actor.tensor_parallel=2"], r"with tensor_parallel=2.* one of them to 1"),
        ([mixture, "actor.expert_parallel=2", "actor.lora.rank=4"], r"lora with expert_parallel=2: .*Leave lora out"),
        ([odd, "actor.expert_parallel=2", "actor.ranks=8", eight], r"among 4 further ranks.*Raise actor"),
    ):
        with pytest.raises(UserError, match=message):
            check("warmup=null", *overrides)
    dealt, whole = (
        check(mixture, "warmup=null", f"actor.expert_parallel={ranks}", "actor.ranks=4", "cluster.devices=cpu:4")
        for ranks in (2, 1)
    )
    assert dealt.memory[-1].transient_bytes > 1.2 * whole.memory[-1].transient_bytes, "tokens travel to their experts"
