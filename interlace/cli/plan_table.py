"""Table of plans that fits 80 columns: figures in rows, followed by the settings of each plan."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from interlace.observe.progress import number, short

if TYPE_CHECKING:
    from interlace.forecast.plan import RecipePlan
    from interlace.forecast.search.plans import Planned

SHOWN = 6
"""Number of plans in the table."""
COLUMNS = ("plan", "s/step", "ratio", "tok/s", "useful", "stale", "len", "cost")


def show_plans(console: Console, made: "RecipePlan", recipe: str) -> None:
    """Prints the best plans, the best unbiased plan and the baseline: figures, then fields that differ from the
    defaults.
    """
    title = f"{recipe} on {made.request.simulation.device}, predicted ({made.request.settings.words})"
    beside = [plan for plan in (made.found.least_stale, made.found.unbiased, made.found.baseline) if plan]
    plans = unique([*made.found.ranked[:SHOWN], *beside])
    has_price = made.price(made.found.best) is not None
    console.print(Text(title, "italic"))
    table = Table(box=None, header_style="bold underline", padding=(0, 1, 0, 0))
    for name in COLUMNS if has_price else COLUMNS[:-1]:
        table.add_column(name, justify="left" if name == "plan" else "right", overflow="fold")
    for place, each in enumerate(plans):
        table.add_row(*map(Text, _make_cells(made, each, place)[: len(table.columns)]))
    console.print(table)
    console.print("What differs from the defaults:")
    for place, each in enumerate(plans):
        console.print(Padding(Text(f"{place + 1}. {differences(each)}"), (0, 0, 0, 2)))
    if tied := [str(place + 1) for place, each in enumerate(plans) if each in made.found.tied][1:]:
        noise = made.request.simulation.profile.step_noise
        console.print(
            f"A tie of plans 1, {', '.join(tied)}: predicted speeds differ by at most {noise:.0%}, the noise of the "
            f"measured steps. Plan {plans.index(made.found.least_stale) + 1} trains the least stale samples of them.",
            highlight=False,
        )


def show_memory(console: Console, made: "RecipePlan") -> None:
    """Prints the memory of each role of the best plan on each of its devices, by part."""
    from interlace.forecast.search.bounds import memory_by_part

    request = made.request
    table = Table(box=None, header_style="bold underline", padding=(0, 1, 0, 0))
    parts = ("state", "moments", "cache", "working")
    for name in ("GiB per device", *parts, "of"):
        table.add_column(name, justify="left" if name == "GiB per device" else "right")
    simulation = request.simulation
    rows = memory_by_part(made.found.best.schedule, simulation.profile, request.workload, simulation.devices)
    for row in rows:
        table.add_row(
            row.role, *(f"{row.parts[part] / 2**30:.1f}" for part in parts), f"{row.device_bytes / 2**30:.0f}"
        )
    console.print(table)


def show_market(console: Console, made: "RecipePlan") -> None:
    """Prints the interruptions of the best plan on its market, if the settings name one, and the price with them."""
    from interlace.forecast.costs.markets import load_market

    market, best = made.request.settings.rented_on, made.found.best
    if market is None:
        return
    found, recipe = made.interruptions(best, market), made.request.recipe
    every = recipe.checkpoint_every
    saved = f"checkpoints every {every} steps" if every else "without checkpoints before the end (checkpoint_every)"
    lines = [
        f"Market {market.name}: {found.per_day:.3g} interruptions a day of all nodes of {market.node_devices} devices. "
        f"{found.restarts_per_day:.3g} a day stop a trainer; each costs {found.restart_loss_s:.0f} s, {saved}. "
        f"Effective training time: {found.effective_time:.2%}."
    ]
    price, calm, usual = made.market_price(best, market), made.price(best), load_market("on-demand")
    if price is not None and calm is not None:
        lines.append(
            f"A million trained tokens cost {price:.3g} ({market.price_share * calm:.3g} without interruptions); on "
            f"demand, with its interruptions, {made.market_price(best, usual):.3g}."
        )
    console.print(" ".join(lines), highlight=False)


def show_training(console: Console, made: "RecipePlan") -> None:
    """Prints the fastest layout of training that fits into memory, if the devices have a data sheet."""
    from interlace.forecast.training import plan_training

    found = plan_training(made.request, made.found.best.schedule)
    if not found:
        return
    best, count = found[0], found[0].layout.num_devices
    parts = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in best.memory.items() if size)
    console.print(
        f"Training on {count} devices, fastest layout of {len(found)} that fit (roofline): {best.step_s:.3g} s per "
        f"optimizer step, {best.memory_bytes / 2**30:.1f} GiB per device ({parts}). Settings: "
        f"{' '.join(best.layout.settings)}",
        highlight=False,
    )


def _make_cells(made: "RecipePlan", plan: "Planned", place: int) -> tuple[str, ...]:
    ratio, score, price = made.found.ratio(plan), plan.score, made.price(plan)
    digits = 0 if score.step_s >= 100 else 1 if score.step_s >= 10 else 2
    return (
        f"{place + 1}. {plan.name}",
        f"{number(score.step_s, digits)} ±{number(2 * score.error_s, digits)}",
        f"{ratio:.2f}x" if ratio else "-",
        short(score.tokens_per_s),
        f"{score.goodput:.0%}",
        f"{score.staleness_mean:.1f}/{plan.staleness_bound}",
        f"{score.length_shift:+.1%}",
        "-" if price is None else f"{price:.3g}",
    )


def unique(plans: "Sequence[Planned]") -> "list[Planned]":
    """Returns the plans without duplicates."""
    found: list[Planned] = []
    for each in plans:
        if each not in found:
            found.append(each)
    return found


def differences(plan: "Planned") -> str:
    """Returns the plan's fields that differ from the defaults, on one line."""
    from interlace.core.yaml_text import to_yaml
    from interlace.forecast.search.plans import list_changes

    return to_yaml(list_changes(plan.schedule), flow=True, width=10**6).strip().removeprefix("{").removesuffix("}")
