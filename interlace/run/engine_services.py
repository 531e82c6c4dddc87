"""Rules for the engines of a run that may be lost and return: health checks, and the text that checks weights."""

from pathlib import Path

from interlace.core.random import keyed_random
from interlace.engines.rollout.config import ServiceConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.rollout.kinds.base import ServedKind
from interlace.engines.train.config import training_temperature
from interlace.models.loading import empty_model
from interlace.rollouts.membership import MembershipRules
from interlace.run.recipe.config import Recipe
from interlace.runtime.cluster import Cluster

PROBE_TOKENS = 24
"""Tokens of the text that checks a server's weights."""


def make_membership_rules(recipe: Recipe) -> MembershipRules:
    """Returns the rules for a recipe's engines. Servers may join, leave, and return after a loss."""
    config, restarts_per_hour = recipe.rollout, recipe.recovery.restarts_per_hour.get("rollout")
    if not create_kind(config).is_service or not isinstance(config, ServiceConfig):
        return MembershipRules(restarts_per_hour=restarts_per_hour)
    probe_ids: list[int] = []
    if training_temperature(recipe.sampling) == 1.0:  # servers score at temperature 1
        vocab_size = empty_model(recipe.model).config.get_text_config().vocab_size
        draw = keyed_random("probe of engine services")
        probe_ids = [draw.randrange(vocab_size) for _ in range(PROBE_TOKENS)]
    return MembershipRules(
        may_change=True,
        watch_every_s=config.heartbeat_s,
        lost_s=config.lost_s,
        probe_ids=probe_ids,
        restarts_per_hour=restarts_per_hour,
    )


def end_unused_servers(recipe: Recipe, folder: Path, cluster: Cluster) -> list[str]:
    """Ends the servers that a killed process of the run left for engines that the run no longer has.

    folder: of the run's engines. Returns a sentence for each server.
    """
    said = []
    for record in sorted(folder.glob("rollout-*.json")):
        is_served = isinstance(create_kind(recipe.rollout), ServedKind)
        if not is_served or int(record.stem.rpartition("-")[2]) >= len(cluster.place("rollout")):
            record.unlink(missing_ok=True)  # which ends the lease
            said.append(f"{record.stem}: a server of the killed process is not adopted, and ends: it has no engine")
    return said
