"""Titles, units and curves of the panels of a page."""

from pathlib import Path

from interlace.observe.report.header import run_facts, summary_cards
from interlace.observe.report.panels import build_panels, panel_specs
from interlace.observe.report.render import format_metric
from interlace.observe.run_data import RunData


def test_the_panels_of_the_critic_have_titles_of_their_own() -> None:
    names = (
        "actor/loss",
        "actor/clip_fraction",
        "critic/loss",
        "critic/clip_fraction",
        "critic/lr",
        "off_policy/value",
    )
    titles = [spec.title for spec in panel_specs(names)]
    assert len(titles) == len(set(titles))
    assert {"Critic: loss", "Critic: learning rate", "Off-policy: value"} <= set(titles)


def test_learning_rates_and_evaluations_are_never_smoothed(tmp_path: Path) -> None:
    rows = [
        {"step": step, "actor/lr": 0.1 * step, "actor/loss": -step, "eval/loss": step, "actor/token_accuracy": step,
         "eval/token_accuracy": step / 2}
        for step in (1, 2)
    ]  # fmt: skip
    shown = build_panels([RunData(name="run", folder=tmp_path, rows=rows, transcripts=[])]).shown
    assert {panel.title: [curve.is_exact for curve in panel.curves] for panel in shown} == {
        "Loss": [False], "Held-out loss": [True], "Right tokens and pairs": [False, True], "Learning rate": [True],
    }  # fmt: skip


def test_each_run_of_a_comparison_has_one_colour_in_a_panel_of_evaluations(tmp_path: Path) -> None:
    rows = [{"step": step, "eval/accuracy_greedy": 0.1 * step, "eval/accuracy_sampled": 0.05 * step} for step in (1, 2)]
    runs = [RunData(name=name, folder=tmp_path, rows=rows, transcripts=[]) for name in ("a", "b")]
    assert [(panel.title, [curve.label for curve in panel.curves]) for panel in build_panels(runs).shown] == [
        ("Held-out accuracy, greedy", ["a", "b"]), ("Held-out accuracy, sampled", ["a", "b"]),
    ]  # fmt: skip
    assert [panel.title for panel in build_panels(runs[:1]).shown] == ["Held-out accuracy"]


def test_more_runs_than_colours_differ_in_their_dashes(tmp_path: Path) -> None:
    rows = [{"step": step, "actor/loss": step} for step in (1, 2)]
    runs = [RunData(name=str(place), folder=tmp_path, rows=rows, transcripts=[]) for place in range(24)]
    [panel] = build_panels(runs).shown
    assert len({(curve.colour, curve.dash) for curve in panel.curves}) == 24


def test_bytes_are_shown_as_mebibytes(tmp_path: Path) -> None:
    rows = [{"step": step, "memory/actor": step * 2**20} for step in (1, 2)]
    [panel] = build_panels([RunData(name="run", folder=tmp_path, rows=rows, transcripts=[])]).shown
    assert panel.curves[0].values == [1.0, 2.0]
    assert format_metric(6.5 * 2**20, "memory/actor") == "6.5 MiB"
    assert format_metric(0.25, "actor/kl") == "0.25"


def test_the_head_of_a_run_on_given_rows_has_its_results(tmp_path: Path) -> None:
    results = {0: (5.67, 0.0), 9: (0.0041, 0.98)}
    evaluations = [
        {"step": step, "eval/loss": loss, "eval/row_accuracy": share} for step, (loss, share) in results.items()
    ]
    run = RunData(name="run", folder=tmp_path, rows=[{"step": 9}], transcripts=[], evaluations=evaluations)
    cards = {card.name: card.value for card in summary_cards(run, "")}
    assert cards["held-out loss"] == "5.67 → 0.0041"
    assert cards["right held-out completions"] == "0 → 0.98"


def test_a_run_of_a_robot_has_panels_of_its_episodes_and_of_replayed_updates() -> None:
    names = [
        "env/success", "env/success/reach-v3", "env/return", "env/episode_length", "env/steps_per_second",
        "imagined/success", "replay/loss", "replay/lr", "replay/size", "world_model/loss", "world_model/error_4",
    ]  # fmt: skip
    added = {spec.title: [line.label for line in spec.lines] for spec in panel_specs(names)}
    assert added["Success"] == ["simulated", "simulated, reach-v3", "imagined"]
    assert added["Return"] == added["Episode length"] == ["simulated"]
    assert {"Replay: loss", "Replay: learning rate", "World model: loss", "World model: error"} <= set(added)
    assert not {"Replay: size", "Replay: gradient norm"} & set(added)


def test_the_task_of_a_robot_names_its_simulator(tmp_path: Path) -> None:
    config = "task: {starts: {}}\nepisode: {env: {family: metaworld, settings: {tasks: [reach-v3]}}}\n"
    run = RunData(name="run", folder=tmp_path, rows=[{"step": 1}], transcripts=[])
    assert {fact.name: fact.value for fact in run_facts(run, config, [])}["task"] == "starts, metaworld: reach-v3"


def test_values_that_differ_by_rounding_alone_are_constant(tmp_path: Path) -> None:
    """The axis of such a chart has no labels that differ, and uPlot draws none for differences of 1e-7."""
    rows = [{"step": step, "actor/ess": 1.0 + step * 1e-7, "actor/kl": step * 1e-9} for step in (1, 2, 3)]
    panels = build_panels([RunData(name="run", folder=tmp_path, rows=rows, transcripts=[])])
    assert [panel.title for panel in panels.shown] == ["KL"] and panels.constants == {"actor/ess": 1.0 + 1e-7}
