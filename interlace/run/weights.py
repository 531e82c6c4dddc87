"""Connects the actor's ranks and the engines for the transfer of weights."""

from interlace.flows.run import RoleGroups
from interlace.run.recipe.config import Recipe
from interlace.weights.choose import choose_transport
from interlace.weights.ref import Route


async def join_weights(groups: RoleGroups, recipe: Recipe) -> str:
    """Chooses a transport and opens it on the actor's ranks. Returns the choice and its reason, for the header."""
    writers = await groups.actor.weight_place()
    readers = [await engine.weight_place() for engine in groups.rollout]
    name, reason = choose_transport(recipe.weights, writers, readers)
    await groups.actor.open_weights(Route(transport=name, config=recipe.weights, reason=reason))
    content = f"{recipe.weights.codec}{', the adapter alone' if recipe.weights.adapter == 'alone' else ''}"
    return f"weights: {name}, {content} ({reason})"
