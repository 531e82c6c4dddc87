"""Engines of a run that may be lost and return: their weights, their health checks, and the text for these checks."""

from interlace.core.random import keyed_random
from interlace.engines.rollout.config import ServiceConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.train.config import training_temperature
from interlace.models.loading import empty_model
from interlace.rollouts.pool import EnginePool
from interlace.run.recipe.config import Recipe

PROBE_TOKENS = 24
"""Tokens of the text that checks a server's weights."""


def follow_services(recipe: Recipe, pool: EnginePool) -> None:
    """Prepares a pool for engines that may be lost and return: servers, and engines whose processes are replaced."""
    config, membership = recipe.rollout, pool.membership
    membership.keeps_published = any(driver.group.can_revive for driver in pool.drivers)
    if not create_kind(config).is_service or not isinstance(config, ServiceConfig):
        return
    membership.may_change, membership.keeps_published, membership.lost_s = True, True, config.lost_s
    if training_temperature(recipe.sampling) == 1.0:  # servers score at temperature 1
        vocab_size = empty_model(recipe.model).config.get_text_config().vocab_size
        draw = keyed_random("probe of engine services")
        membership.probe_ids = [draw.randrange(vocab_size) for _ in range(PROBE_TOKENS)]
    membership.watch_every_s = config.heartbeat_s
