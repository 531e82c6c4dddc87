"""The update depends neither on the number of ranks nor on the distribution of samples."""

import dataclasses
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from interlace.core.errors import RemoteError
from interlace.core.types import Sample, Segment
from interlace.engines.train.ranks import Ranks, _open_store
from tests.support.listening import listening_addresses
from tests.support.rank_pair import RankPair, Setting, Update, make_engine, rank_pair, update
from tests.unit.engines.train.models import ragged_samples
from tests.unit.engines.train.test_engine import AGGREGATIONS, close

FEW = settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.fixture(scope="module")
def pair() -> Iterator[RankPair]:
    with rank_pair() as found:
        yield found


def alone(setting: Setting, samples: list[Sample]) -> Update:
    """One rank, one call, one micro-batch."""
    engine = make_engine(dataclasses.replace(setting, budget=10_000), Ranks())
    engine.accumulate(samples)
    return update(engine)


def same(one: Update, other: Update) -> bool:
    metrics = one.metrics == pytest.approx(other.metrics, abs=1e-5, rel=1e-4)
    return metrics and close(one.gradient, other.gradient)


@FEW
@given(data=st.data())
def test_loss_and_gradient_depend_on_the_samples_alone(pair: RankPair, data: st.DataObject) -> None:
    """Whatever the number of ranks, the budget of a micro-batch, the packing order, and the order of arrival."""
    samples = ragged_samples(data.draw(st.integers(1, 9)), seed=data.draw(st.integers(0, 99)))
    setting = Setting(
        aggregation=data.draw(st.sampled_from(AGGREGATIONS)),
        budget=data.draw(st.integers(1, 120)),
        gradient_checkpointing=data.draw(st.booleans()),
        reshard=data.draw(st.booleans()),
    )
    shuffled, cut = data.draw(st.permutations(samples)), data.draw(st.integers(0, len(samples)))
    pair.start(setting)
    for part in (shuffled[:cut], shuffled[cut:]):
        pair.accumulate(part)
    assert same(pair.update(), alone(setting, samples))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_rank_s_own_denominator_is_caught(pair: RankPair, aggregation: str) -> None:
    samples = sorted(ragged_samples(9), key=lambda sample: sample.num_tokens)
    wrong = Setting(aggregation=aggregation, is_local_denominator=True)  # type: ignore[arg-type]
    pair.start(wrong)
    pair.accumulate_parts([samples[:6], samples[6:]])
    assert not same(pair.update(), alone(wrong, samples))


@pytest.mark.parametrize("reshard", [True, False])
def test_a_rank_without_samples_takes_part(pair: RankPair, *, reshard: bool) -> None:
    setting, samples = Setting(budget=40, reshard=reshard), ragged_samples(6)
    pair.start(setting)
    pair.accumulate_parts([samples[:4], []])
    pair.accumulate_parts([[], samples[4:]])
    assert same(pair.update(), alone(setting, samples))
    assert pair.update().metrics["actor/skipped_minibatches"] == 1, "nobody had any"


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "mixtral", "bloom"])
def test_steps_on_two_ranks_are_steps_on_one(pair: RankPair, kind: str, *, reshard: bool) -> None:
    """Tied and untied heads, experts, padded attention; clipping by the norm of the whole gradient."""
    setting = Setting(kind=kind, budget=60, max_grad_norm=0.1, reshard=reshard)
    engine = make_engine(setting, Ranks())
    pair.start(setting)
    for step in range(3):
        samples = ragged_samples(7, seed=step)
        engine.accumulate(samples)
        pair.accumulate(samples)
        expected, got = update(engine), pair.update()
        assert got.metrics == pytest.approx(expected.metrics, abs=1e-4, rel=1e-4)
        assert abs(got.metrics["actor/loss"] - expected.metrics["actor/loss"]) < 1e-5 if step == 0 else True
    assert got.weights.keys() == expected.weights.keys()


@pytest.mark.parametrize("reshard", [True, False])
def test_logprobs_follow_the_update(pair: RankPair, *, reshard: bool) -> None:
    """A forward without backward leaves nothing behind that a later update would miss."""
    setting, samples = Setting(budget=40, reshard=reshard), ragged_samples(7)
    engine = make_engine(setting, Ranks())
    pair.start(setting)
    for _ in range(2):
        ours, theirs = pair.logprobs(samples), engine.logprobs(samples)
        assert all(np.allclose(one, other, atol=2e-5) for one, other in zip(ours, theirs, strict=True))
        engine.accumulate(samples)
        pair.accumulate(samples)
        update(engine)
        pair.update()


@pytest.mark.parametrize("reshard", [True, False])
def test_logprobs_in_the_middle_of_a_minibatch_cost_it_nothing(pair: RankPair, *, reshard: bool) -> None:
    """As where samples are trained on while later ones are still scored."""
    setting, samples = Setting(budget=40, reshard=reshard), ragged_samples(7)
    pair.start(setting)
    pair.accumulate(samples[:3])
    pair.logprobs(samples)
    pair.accumulate(samples[3:])
    assert same(pair.update(), alone(setting, samples))


@pytest.mark.parametrize("reshard", [True, False])
def test_shards_may_leave_their_devices_in_the_middle_of_a_minibatch(pair: RankPair, *, reshard: bool) -> None:
    setting, samples = Setting(budget=40, reshard=reshard, kind="gpt2"), ragged_samples(7)
    engine = make_engine(setting, Ranks())
    pair.start(setting)
    for _ in range(2):
        engine.accumulate(samples)
        pair.accumulate(samples[:4])
        pair.relocate()
        pair.accumulate(samples[4:])
        assert same(pair.update(), update(engine))


@pytest.mark.parametrize("reshard", [True, False])
def test_an_adapter_is_shared_out_too(pair: RankPair, tmp_path: Path, *, reshard: bool) -> None:
    pytest.importorskip("peft")
    setting, samples = Setting(budget=60, lora_rank=4, reshard=reshard), ragged_samples(7)
    engine = make_engine(setting, Ranks())
    pair.start(setting)
    base = pair.base_logprobs(samples)
    for _ in range(3):
        engine.accumulate(samples)
        pair.accumulate(samples)
        expected, got = update(engine), pair.update()
        assert same(got, expected) and got.metrics["actor/grad_norm"] > 0
    assert all(np.allclose(one, other, atol=2e-5) for one, other in zip(base, pair.base_logprobs(samples), strict=True))
    pair.save(tmp_path / "two")
    engine.copy_to_host(None).write(tmp_path / "one")
    ours, theirs = (load_file(tmp_path / name / "adapter" / "adapter_model.safetensors") for name in ("two", "one"))
    assert ours.keys() == theirs.keys() and all(torch.allclose(ours[name], theirs[name], atol=1e-4) for name in ours)


def test_a_minibatch_too_far_out_is_dropped_on_every_rank(pair: RankPair) -> None:
    setting = Setting(skip_ratio=1.5)
    pair.start(setting)
    pair.accumulate(ragged_samples(6))
    got, expected = pair.update(), alone(setting, ragged_samples(6))
    assert got.metrics["actor/skipped_minibatches"] == expected.metrics["actor/skipped_minibatches"] == 1
    before = make_engine(setting, Ranks()).weights()
    assert all(torch.equal(got.weights[name], tensor) for name, tensor in before.items())


def test_weights_and_moments_are_shared_out(pair: RankPair) -> None:
    setting, samples = Setting(), ragged_samples(4)
    pair.start(setting)
    pair.accumulate(samples)
    pair.update()
    whole = sum(parameter.nbytes for parameter in make_engine(setting, Ranks()).model.parameters())
    found = pair.resident_bytes()
    for rank, (parameters, moments) in enumerate(found):
        print(
            f"rank {rank}: parameters {parameters:,} bytes, moments {moments:,} bytes, of {whole:,} and {2 * whole:,}"
        )
        assert parameters < 0.6 * whole and moments == 2 * parameters
    assert sum(parameters for parameters, _ in found) == whole


@pytest.mark.parametrize("kind", ["qwen2", "mixtral"])
def test_a_checkpoint_is_read_by_another_number_of_ranks(pair: RankPair, tmp_path: Path, kind: str) -> None:
    """One saves and two go on, two save and one goes on: the steps that follow are those of an engine that went on."""
    setting, batches = Setting(kind=kind, budget=60), [ragged_samples(6, seed=seed) for seed in range(6)]
    engine = make_engine(setting, Ranks())
    for batch in batches[:2]:
        engine.accumulate(batch)
        update(engine)
    engine.copy_to_host(None).write(tmp_path / "one")
    pair.start(setting, tmp_path / "one")
    for batch in batches[2:4]:
        engine.accumulate(batch)
        pair.accumulate(batch)
        expected, got = update(engine), pair.update()
        assert same(got, expected)
    pair.save(tmp_path / "two")
    resumed = make_engine(setting, Ranks(), tmp_path / "two")
    assert resumed.num_updates == 4
    for batch in batches[4:]:
        for each in (engine, resumed):
            each.accumulate(batch)
        expected, got = update(engine), update(resumed)
        assert got.metrics["actor/loss"] == pytest.approx(expected.metrics["actor/loss"], abs=1e-5)


@pytest.mark.slow  # two processes of its own, since it leaves one of them waiting
def test_an_error_on_one_rank_is_raised_and_nothing_hangs() -> None:
    samples = ragged_samples(2)
    bare = Sample(key=samples[0].key, prompt=samples[0].prompt, segments=(Segment(token_ids=samples[0].token_ids),))
    with rank_pair() as own:
        own.start(Setting())
        with pytest.raises(RemoteError, match=r"actor\[rank 1\].*\n[\s\S]*without advantages"):
            own.accumulate_parts([samples, [bare]])


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the sockets of a process")
def test_ranks_of_one_machine_listen_on_loopback_alone(pair: RankPair) -> None:
    found = pair.listens_on()
    assert all(addresses and addresses <= {"127.0.0.1", "::1"} for addresses in found), found


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux for the sockets of a process")
def test_a_store_for_several_machines_listens_on_one_address() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    before = listening_addresses(os.getpid())
    store = _open_store(f"tcp://127.0.0.1:{port}", rank=0, num_ranks=1)
    store.set("a", "b")
    assert listening_addresses(os.getpid()) - before <= {"127.0.0.1"}
    assert listening_addresses(os.getpid()) >= {"127.0.0.1"}
