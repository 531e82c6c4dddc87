"""Tables that show a profile."""

from collections.abc import Iterator
from statistics import fmean

from rich.table import Table
from rich.text import Text

from interlace.forecast.profile.types import InferenceCosts, Profile, RolloutCosts, TrainCosts

MIB = 2**20


def profile_tables(profile: Profile) -> Iterator[Table]:
    """Yields tables of the costs of each role, of decode steps by batch, and of interference."""
    yield _make_roles_table(profile)
    yield _make_decode_table(profile.rollout)
    if profile.interference:
        yield _make_interference_table(profile)


def _make_roles_table(profile: Profile) -> Table:
    table = _make_table(f"Costs on {profile.label}")
    _rollout_rows(table, profile.rollout)
    for role, costs in (("reference", profile.reference), ("critic", profile.critic), ("actor", profile.actor)):
        if isinstance(costs, TrainCosts):
            _train_rows(table, role, costs)
        elif costs is not None:
            table.add_row(role, "log-probs", _format_rate(costs.token_s), f"{_format_time(costs.call_s)} a call more")
        if costs is not None:
            _state_row(table, costs)
    reward, lengths = profile.reward, profile.lengths
    scorers = f"{reward.workers} at once" if reward.workers > 1 else "one at a time"
    table.add_row(
        "reward",
        "latency",
        _format_time(reward.median_s),
        f"median; {scorers}, {_format_time(reward.call_s)} a call more",
    )
    right = f"likeness within a prompt {reward.solve_spread:.2f}, {reward.fail_share:.1%} could not be scored"
    table.add_row("", "right", f"{reward.solve_rate:.1%}", right)
    if profile.controller_sample_s:
        table.add_row("controller", "sample", _format_time(profile.controller_sample_s), "beside all calls")
    if profile.controller_step_s:
        table.add_row("controller", "step", _format_time(profile.controller_step_s), "while the trainer waits")
    if profile.step_noise:
        table.add_row("steps", "noise", f"{profile.step_noise:.0%}", "speeds of schedules that differ by less are tied")
    mean = fmean(lengths.quantiles) if lengths.quantiles else lengths.median
    spread = f"median {lengths.median:.0f}; spread of the logarithm {lengths.prompt_sigma:.2f} between prompts"
    table.add_row("responses", "length", f"{mean:.1f}", f"{spread}, {lengths.response_sigma:.2f} within one")
    if profile.turns:
        turns = profile.turns
        tools = _format_time(fmean(turns.tool_s))
        given = f"{fmean(turns.given_tokens):.0f} tokens given before a later one, tools {tools}"
        table.add_row("episodes", "turns", f"{fmean(turns.turns):.1f}", f"mean; {given}")
    return table


def _rollout_rows(table: Table, costs: RolloutCosts) -> None:
    largest = costs.steps[-1][0]
    table.add_row(
        "rollout", "decode", _format_rate(costs.step_s(largest) / largest), f"with {largest} sequences, no context"
    )
    table.add_row("", "context", _format_time(costs.context_token_s), "a step for each cached token")
    table.add_row("", "prefill", _format_rate(costs.prefill_token_s), "")
    begin = f"{_format_time(costs.intake_s)} more in a pass in which sequences begin"
    taken = f"{begin}, and {_format_time(costs.sequence_s)} for each sequence"
    table.add_row("", "serve call", _format_time(costs.call_s), taken)
    table.add_row("", "update", _format_time(costs.update_s), "all weights")
    _state_row(table, costs)


def _train_rows(table: Table, role: str, costs: TrainCosts) -> None:
    table.add_row(
        role, "training", _format_rate(costs.token_s), f"forward and backward; {_format_time(costs.call_s)} a call more"
    )
    table.add_row("", "inference", _format_rate(costs.inference_token_s), "")
    table.add_row("", "optimizer", _format_time(costs.optimizer_s), "a minibatch")
    table.add_row("", "export", _format_time(costs.export_s), "all weights")
    table.add_row("", "two devices", f"{costs.speed(2):.2f}x", "as fast as one")


def _state_row(table: Table, costs: InferenceCosts | RolloutCosts) -> None:
    size = (costs.state_bytes + costs.device_bytes) / MIB
    cache = f", of which {costs.device_bytes / MIB:,.0f} KV cache" if costs.device_bytes else ""
    moved = f"{_format_time(costs.onload_s)} onto the device, {_format_time(costs.offload_s)} off it"
    table.add_row("", "memory", f"{size:,.0f} MiB{cache}", moved)


def _make_decode_table(costs: RolloutCosts) -> Table:
    table = Table(title=Text("A decode step, without context"), title_justify="left", box=None, padding=(0, 2, 0, 0))
    for heading in ("sequences", "takes", "tokens/s"):
        table.add_column(heading, justify="right")
    for batch, seconds in costs.steps:
        table.add_row(str(batch), _format_time(seconds), f"{batch / seconds:,.0f}")
    return table


def _make_interference_table(profile: Profile) -> Table:
    table = _make_table("Side by side, on different devices")
    for pair in profile.interference:
        calls = "" if pair.call_slowdown is None else f", {pair.call_slowdown:.2f}x in the constant part of a call"
        table.add_row(pair.role, f"beside {pair.beside}", f"{pair.slowdown:.2f}x as long{calls}")
    return table


def _make_table(title: str) -> Table:
    return Table(title=Text(title), title_justify="left", box=None, padding=(0, 2, 0, 0), show_header=False)


def _format_time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e9:.3g} ns"


def _format_rate(token_s: float) -> str:
    return f"{1 / token_s:,.0f} tokens/s" if token_s > 0 else "not measurable"
