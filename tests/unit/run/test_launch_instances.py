"""Starts of a role's workers that cannot succeed."""

import asyncio
from pathlib import Path
from typing import cast

import pytest

from interlace.core.errors import UserError
from interlace.run.launch import RoleWorker, launch_instances
from interlace.run.recipe.load import load_recipe
from interlace.runtime.cluster import Cluster
from interlace.schedule.roles import ROLES
from interlace.workers.rollout import RolloutWorker


def test_an_address_file_that_was_emptied_after_the_check_is_refused(tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("")
    recipe = load_recipe("quickstart", ["rollout.engine=address", f"rollout.urls_file={tmp_path / 'urls'}"])
    role = next(role for role in ROLES if role.name == "rollout")
    worker = RoleWorker(worker_class=RolloutWorker, factory=lambda _: None, on_host=True)  # type: ignore[arg-type, return-value]
    no_cluster = cast("Cluster", None)  # the addresses are counted first
    with pytest.raises(UserError, match="has none now"):
        asyncio.run(launch_instances(no_cluster, recipe, role, worker, 0))
