"""A page of several runs lists the settings that differ."""

from functools import partial
from pathlib import Path

from interlace.core.callables import make_process_name
from interlace.observe.report.page import find_differences, write_report
from tests.unit.observe.report.test_page import make_run


def test_only_settings_that_differ_are_listed_by_their_dotted_name() -> None:
    first = "seed: 0\noptimizer: {lr: 0.1, betas: [0.9, 0.95]}\nwarmup: null\n"
    second = "seed: 0\noptimizer: {lr: 0.2, betas: [0.9, 0.95]}\nwarmup: {steps: 3}\n"
    rows = [(row.name, list(row.values)) for row in find_differences([first, second])]
    assert rows == [("optimizer.lr", ["0.1", "0.2"]), ("warmup", ["null", "-"]), ("warmup.steps", ["-", "3"])]
    assert find_differences([first]) == find_differences([first, first]) == []
    assert find_differences(["{broken", "{broken"]) == []


def test_a_function_of_a_program_differs_only_if_its_code_or_its_values_differ() -> None:
    """Its name has a random number, so that no later process finds another function by it."""

    def score(completion: str, limit: int = 3) -> float:
        return float(len(completion) < limit)

    functions = (score, score, partial(score, limit=4), partial(score, limit=4), lambda completion: 1.0)
    names = [make_process_name(each, "score") for each in functions]
    assert len({*names}) == len(names)
    configs = [f"reward: {{name: 'interlace.rewards.given:{name}'}}" for name in names]
    assert find_differences(configs[:2]) == find_differences(configs[2:4]) == []
    for first, second in ((0, 2), (0, 4), (2, 4)):
        assert [row.name for row in find_differences([configs[first], configs[second]])] == ["reward.name"]


def test_a_report_of_two_runs_shows_them(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, name) for name in ("first", "second")]
    write_report(runs, tmp_path / "equal.html")
    assert "All settings are equal." in (tmp_path / "equal.html").read_text()
    runs[1].config.write_text("model: tiny:mini\nnote: a < b\n")
    write_report(runs, tmp_path / "differ.html")
    html = (tmp_path / "differ.html").read_text()
    assert html.count("<summary>Facts of") == 2
    assert "Settings that differ" in html and "<td>tiny:mini</td>" in html
