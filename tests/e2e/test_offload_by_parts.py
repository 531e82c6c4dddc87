"""Colocated roles train to identical results on a device that has room only for parts of their states."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from interlace.core.state_parts import GRADIENTS, KV, OPTIMIZER, WEIGHTS
from interlace.engines.rollout.engine import NativeEngine
from interlace.models.residence import Residence
from interlace.run.clusters import local
from interlace.run.recipe.check import check_recipe
from interlace.run.recipe.load import load_recipe
from interlace.runtime.device_lock import DeviceLock
from interlace.runtime.worker import Operation
from interlace.schedule.placement import Device
from tests.support.training import SMALL, equal_weights, final_weights, run, samples

SETTINGS = (
    "steps=3",
    "schedule=verl-colocated",
    "algorithm.kl_coefficient=0.1",
    "rollout.max_tokens=2048",
    "tokens_per_microbatch=256",
    "reward.name=tests.support.reward_functions:length",
    "reward.tag=null",
    "reward.answer_format=text",
)


def test_what_fits_only_by_parts_runs_to_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = Device(index=0, pool="cpu", pool_index=0, memory_bytes=2**34)
    monkeypatch.setattr(local, "find_devices", lambda config: (roomy,))
    run(tmp_path, "roomy", SETTINGS)
    actor = check_recipe(load_recipe("quickstart", [*SMALL, *SETTINGS])).memory[-1]
    narrow = replace(roomy, memory_bytes=actor.peak_bytes + 1000)
    assert narrow.memory_bytes < actor.num_bytes + actor.transient_bytes, "not while the moments are there"
    monkeypatch.setattr(local, "find_devices", lambda config: (narrow,))
    moved = recorded(monkeypatch)
    ledgers = ledgers_of(monkeypatch, narrow)
    run(tmp_path, "narrow", SETTINGS)
    drawn = [[(row["uid"], row["token_ids"]) for row in samples(tmp_path, name)] for name in ("roomy", "narrow")]
    assert drawn[0] == drawn[1]
    assert equal_weights(final_weights(tmp_path, "roomy"), final_weights(tmp_path, "narrow"))
    assert OPTIMIZER in moved and KV in moved
    quarter = actor.num_bytes // 4
    for ledger in ledgers:
        state = ledger.get("actor", {})
        assert state.items() <= {GRADIENTS: quarter, OPTIMIZER: 2 * quarter, WEIGHTS: quarter}.items()


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Has parts leave on a CPU too, where nothing would move; returns those that leave, as they do."""
    moved: list[str] = []
    leave = NativeEngine.offload

    def offload(self: Residence, parts: Sequence[str] | None = None) -> None:
        for part in self._choose_parts(parts):
            if part not in self._away:
                self._relocate[part](torch.clone)
                self._away.add(part)
                moved.append(part)

    def engine_leaves(self: NativeEngine, kv: str, parts: Sequence[str]) -> None:
        moved.extend(part for part in parts if part == KV)
        leave(self, kv, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(Residence, "offload", offload)
    monkeypatch.setattr(NativeEngine, "offload", engine_leaves)
    return moved


def ledgers_of(monkeypatch: pytest.MonkeyPatch, device: Device) -> list[dict[str, dict[str, int]]]:
    """Returns what is loaded before each operation, by role and part, and holds it against the device."""
    found: list[dict[str, dict[str, int]]] = []
    bring = DeviceLock.bring

    async def watched(self: DeviceLock, tenant: object, how: Operation) -> None:
        await bring(self, tenant, how)  # type: ignore[arg-type]
        ledger = {name.partition("/")[0]: dict(parts) for name, parts in self.list_loaded_parts(0).items()}
        found.append(ledger)
        working = tenant.working_bytes if how.makes_activations else 0  # type: ignore[attr-defined]
        assert sum(sum(parts.values()) for parts in ledger.values()) + working <= device.memory_bytes

    monkeypatch.setattr(DeviceLock, "bring", watched)
    return found
