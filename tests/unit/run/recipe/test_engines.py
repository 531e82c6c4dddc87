"""An engine is selected by name; unsupported settings are refused before work starts."""

import importlib.util
from collections.abc import Callable

import pytest

from interlace.core.errors import UserError
from interlace.engines.rollout.config import NativeConfig, SGLangConfig, VLLMConfig
from interlace.engines.rollout.kinds import EngineKind, EngineSite, create_kind, engine_kind, engine_names
from interlace.engines.rollout.protocol import RolloutEngine
from interlace.models.loading import LoadedModel
from interlace.run.recipe.check import Derived, check_recipe
from interlace.run.recipe.config import Recipe
from interlace.run.recipe.engines import check_engine, check_features, check_invariance
from interlace.run.recipe.layout import num_used
from interlace.run.recipe.load import load_recipe
from interlace.schedule.placement import Device

LACKING = "rollout.engine=tests.unit.run.recipe.test_engines:Lacking"
VIRTUAL = ("--devices", "2", "--profile", "qwen2.5-7b-h20")
CPU = ("cluster.devices=cpu:4",)


class Lacking(EngineKind):
    """One that spans what its settings say and has nothing that may be missing."""

    Config = VLLMConfig
    config: VLLMConfig
    lacks = engine_kind("vllm").lacks

    def num_devices(self, pool: str) -> int:
        return self.config.tensor_parallel_size

    def create(self, loaded: LoadedModel, site: EngineSite) -> RolloutEngine:
        raise AssertionError("nothing is made before the start")


def recipe(*overrides: str) -> Recipe:
    return load_recipe("quickstart", overrides)


def check(*overrides: str) -> Derived:
    return check_recipe(recipe(*overrides))


def test_a_name_brings_its_own_settings_and_config_yaml_keeps_them() -> None:
    assert engine_names() == ["address", "interlace", "native", "sglang", "vllm"]
    native = recipe("rollout.kv=pages").rollout
    assert isinstance(native, NativeConfig) and native == recipe().rollout.model_copy(update={"kv": "pages"})
    for chosen in (recipe("rollout=vllm"), recipe("rollout={engine: vllm, tensor_parallel_size: 2}")):
        assert isinstance(chosen.rollout, VLLMConfig)
        assert Recipe.parse(chosen.model_dump(mode="json")) == chosen
    assert recipe("rollout=vllm", "rollout.max_tokens=64").rollout == VLLMConfig(max_tokens=64), "a new section"
    shared = recipe("rollout.engine=sglang", "rollout.max_running=3").rollout
    assert isinstance(shared, SGLangConfig) and shared.max_running == 3
    assert isinstance(create_kind(recipe(LACKING).rollout), Lacking)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.engine=vlm", "unknown rollout engine 'vlm'. Did you mean 'vllm'"),
        ("rollout.engine=3", "rollout.engine = 3: write a name"),
        ("rollout={engine: vllm, kv: pages}", "rollout, with engine vllm: unknown key 'kv'"),
        ("rollout={engine: native, gpu_memory_utilization: 0.5}", "rollout, with engine native: unknown key"),
        ("rollout.max_running=0", "max_running = 0: it must be 1 or more"),
        ("rollout.engine=tests.unit.run.recipe.test_engines:recipe", "not a subclass of EngineKind"),
    ],
)
def test_a_wrong_name_or_setting_is_named(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        recipe(override)


def test_an_engine_that_is_not_there_says_what_to_install() -> None:
    with pytest.raises(UserError, match=r"'sglang' is not run here: SGLang's kernels are for GPUs.*native"):
        check("rollout.engine=sglang", *CPU)
    if importlib.util.find_spec("vllm") is None:
        with pytest.raises(UserError, match=r"'vllm' is not run here: vLLM is not installed.*docs/rollout-engine.md"):
            check("rollout.engine=vllm", *CPU)


@pytest.mark.parametrize("role", ["rollout", "reference"])
def test_a_device_that_no_engine_would_compute_on_is_refused(role: str) -> None:
    """Of CPU cores, each has a thread; where the recipe says how many threads there are, or on GPUs, one is used."""
    wide = f"schedule.placement.{role}={{devices: all, devices_per_instance: 2}}"
    check(wide, "algorithm.kl_coefficient=0.1", *CPU)
    gpus = tuple(Device(index=n, pool="cuda", pool_index=n, memory_bytes=2**34) for n in range(2))
    with pytest.raises(UserError, match=rf"placement.{role}: an instance has 2 devices .* compute[sd] on 1\. Set"):
        check_engine(recipe(wide, "algorithm.kl_coefficient=0.1"), gpus, None)  # type: ignore[arg-type]  # unread
    with pytest.raises(UserError, match=rf"placement.{role}: an instance has 2 devices .*compute[sd] on 1"):
        check(wide, "algorithm.kl_coefficient=0.1", "cluster.threads_per_worker=1", *CPU)


def test_an_engine_that_spans_devices_takes_as_many() -> None:
    wide = "schedule.placement.rollout={devices: all, devices_per_instance: 2}"
    derived = check(LACKING, wide, "rollout.tensor_parallel_size=2", *CPU)
    one = check(*CPU)
    rollouts = [worker for worker in derived.memory if worker.worker.startswith("rollout")]
    assert [len(worker.devices) for worker in rollouts] == [2, 2]
    assert 2 * rollouts[0].num_bytes == one.memory[0].num_bytes, "each device has its part"
    with pytest.raises(UserError, match=r"an instance has 1 devices .* computes on 2"):
        check(LACKING, "rollout.tensor_parallel_size=2", *CPU)


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (("sampling.raw_logprobs=true",), "sampling.raw_logprobs=true"),
        (("schedule=async-colocated",), "schedule.kv_on_switch=offload"),
        (("schedule.concurrency=adaptive",), "schedule.concurrency=adaptive"),
        (("schedule.concurrency=episodes",), "or schedule.concurrency.kv_tokens"),
    ],
)
def test_what_an_engine_lacks_is_refused_where_it_is_asked_for(overrides: tuple[str, ...], reason: str) -> None:
    check(*overrides, *CPU)
    with pytest.raises(UserError, match=rf"cannot do this: .*{reason}.*rollout.engine=native"):
        check(*overrides, LACKING, *CPU)


@pytest.mark.parametrize("cut", ["top_p=0.9", "top_k=5", "min_p=0.1"])
def test_log_probs_from_before_truncation_are_not_trained_on(cut: str) -> None:
    gpu = (Device(index=0, pool="cuda", pool_index=0, memory_bytes=2**34),)
    asked = recipe("rollout.engine=sglang", f"sampling.{cut}")
    found: Callable[[str], object] = importlib.util.find_spec
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: name == "sglang" or found(name))
        with pytest.raises(UserError, match="from before top_p, top_k and min_p"):
            check_engine(asked, gpu, None)  # type: ignore[arg-type]  # SGLang looks at no model


def test_a_temperature_that_vllm_replaces_is_refused() -> None:
    """Its samples and log-probs would be of temperature 0.01, and training would compute another distribution."""
    with pytest.raises(UserError, match=r"samples at temperature 0\.01 .*sampling\.temperature is 0\.005"):
        check_features(recipe("rollout.engine=vllm", "sampling.temperature=0.005"), ())
    check_features(recipe("rollout.engine=vllm", "sampling.temperature=0.01"), ())
    check_features(recipe("sampling.temperature=0.005"), ())


def test_schedules_are_compared_on_an_engine_whose_samples_are_their_own() -> None:
    check_invariance(recipe())
    with pytest.raises(UserError, match="gives a sample other bits in another batch"):
        check_invariance(recipe(LACKING))


def test_the_simulator_plans_what_no_engine_here_does_and_says_so() -> None:
    from typer.testing import CliRunner

    from interlace.cli.main import app

    wide = "schedule.placement.rollout={devices: all, devices_per_instance: 2}"
    done = CliRunner().invoke(app, ["simulate", "quickstart", wide, "steps=1", *VIRTUAL])
    assert done.exit_code == 0, done.output
    assert "instances of rollout span several devices" in done.output
    plain = CliRunner().invoke(app, ["simulate", "quickstart", "steps=1", *VIRTUAL])
    assert "span several" not in plain.output


def test_every_device_that_an_engine_spans_counts_as_used() -> None:
    """The ledger once booked one of the two GPUs of a served engine, though memory was divided by two."""
    gpus = tuple(Device(index=n, pool="cuda", pool_index=n, memory_bytes=2**34) for n in range(2))
    served = recipe("rollout={engine: vllm, tensor_parallel_size: 2}")
    assert num_used(served, "rollout", gpus) == 2
    assert num_used(served, "reference", gpus) == num_used(recipe(), "rollout", gpus) == 1


def test_an_adapter_travels_alone_to_engines_that_add_it_alone() -> None:
    adapter = ("weights.adapter=alone", "actor.lora={}")
    with pytest.raises(UserError, match=r"no adapter is trained: set actor\.lora"):
        check(adapter[0])
    with pytest.raises(UserError, match=r"does not add adapters to its weights: set weights\.adapter=merged"):
        check(*adapter, LACKING)
    merged, alone = check(adapter[1]).memory, check(*adapter).memory
    assert alone[0].num_bytes > merged[0].num_bytes and "layers without the adapter" in alone[0].how
