"""Starts of a role's workers that cannot succeed."""

import asyncio
import gc
from pathlib import Path
from typing import cast

import pytest

from interlace.core.errors import UserError
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.kinds.address import AddressKind
from interlace.models.config import ModelConfig
from interlace.models.loading import count_ids, load_model
from interlace.run.host import make_membership_rules
from interlace.run.launch import RoleWorker, launch_instances
from interlace.run.launch_services import fix_addresses
from interlace.run.recipe.load import load_recipe
from interlace.runtime.cluster import Cluster
from interlace.runtime.worker import WorkerSpec
from interlace.schedule.placement import ROLES, Device
from interlace.workers.rollout import RolloutWorker


def test_an_address_file_that_was_emptied_after_the_check_is_refused(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("")
    recipe = load_recipe("quickstart", ["rollout.engine=address", f"rollout.urls_file={tmp_path / 'urls'}"])
    role = next(role for role in ROLES if role.name == "rollout")
    worker = RoleWorker(worker_class=RolloutWorker, factory=lambda _: None, on_host=True)  # type: ignore[arg-type, return-value]
    no_cluster = cast("Cluster", None)  # the addresses are counted first
    with pytest.raises(UserError, match="has none now"):
        asyncio.run(launch_instances(no_cluster, recipe, role, worker, 0))


def test_engines_keep_their_addresses_when_the_file_of_addresses_changes(tmp_path: Path) -> None:
    file = tmp_path / "urls"
    file.write_text("http://b:2\nhttp://c:3\n")
    settings = ["rollout.engine=address", "rollout.urls=[http://a:1]", f"rollout.urls_file={file}"]
    recipe = fix_addresses(load_recipe("quickstart", settings))
    file.unlink()  # an engine whose process ended starts again later
    kind = create_kind(recipe.rollout)
    assert isinstance(kind, AddressKind)
    assert kind.urls == ("http://a:1", "http://b:2", "http://c:3")


@pytest.mark.filterwarnings("error:coroutine .* was never awaited:RuntimeWarning")
def test_after_a_failed_start_no_other_start_of_the_role_is_left_unawaited() -> None:
    class FailingCluster:
        def place(self, role: str) -> list[tuple[Device, ...]]:
            return [(Device(index=index, pool="cpu", pool_index=index, memory_bytes=1 << 30),) for index in range(2)]

        async def launch(self, spec: WorkerSpec) -> None:
            raise UserError(f"{spec.name} does not start")

    recipe = load_recipe("quickstart", ["cluster.devices=cpu:2"])
    role = next(role for role in ROLES if role.name == "rollout")
    worker = RoleWorker(worker_class=RolloutWorker, factory=lambda _: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(UserError, match="does not start"):
        asyncio.run(launch_instances(cast("Cluster", FailingCluster()), recipe, role, worker, 0))
    gc.collect()


def test_the_probe_of_servers_holds_only_ids_of_the_tokenizer(tmp_path: Path) -> None:
    """The trainer has no log-prob of the others, so that the first update of the servers ended the run."""
    loaded = load_model(ModelConfig(path="tiny:micro"))
    loaded.model.resize_token_embeddings(4000)
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    rules = make_membership_rules(load_recipe("quickstart", [f"model={tmp_path}", "rollout=interlace"]))
    assert rules.probe_ids and max(rules.probe_ids) < count_ids(loaded.tokenizer)
