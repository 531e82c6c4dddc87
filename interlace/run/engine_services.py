"""Rules for the engines of a run that may be lost and return: health checks, and the text that checks weights."""

from interlace.core.random import keyed_random
from interlace.engines.rollout.config import ServiceConfig
from interlace.engines.rollout.kinds import create_kind
from interlace.engines.train.config import training_temperature
from interlace.models.loading import empty_model
from interlace.rollouts.membership import MembershipRules
from interlace.run.recipe.config import Recipe

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
