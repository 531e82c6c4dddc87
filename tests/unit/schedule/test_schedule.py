"""Fields are validated together: impossible combinations are refused with the reason, before a run."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Oversample, Schedule, TailBatching


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pipeline_depth": 2, "max_staleness": 1}, "further ahead than any sample may be stale"),
        ({"tail": "oversample", "max_staleness": 1}, "needs max_staleness 0 and sync_every 1"),
        ({"tail": "tail_batching", "sync_every": 2}, "needs max_staleness 0 and sync_every 1"),
        ({"overtake": 0.3}, "which batching 'step' forbids"),
        ({"on_straggler": "drop"}, "which batching 'step' forbids"),
        ({"on_update": "keep", "kv_on_switch": "recompute"}, "whether it was kept would be chance"),
        ({"dispatch": "fastest"}, "unknown dispatch policy 'fastest'"),
        ({"placement": {"trainer": "all"}}, "unknown key .placement.trainer.. Known: actor"),
    ],
)
def test_a_combination_that_cannot_work_is_refused(fields: dict[str, object], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        Schedule.parse(fields)


def test_a_file_that_is_no_text_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(b"\x80\x81")
    with pytest.raises(UserError, match=r"mine.yaml' .* is not YAML"):
        load_schedule(str(path))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max_staleness: 1\nbatching: arrival\nmax_staleness: 4", "key 'max_staleness' is written twice"),
        ("on: 1", "a key reads as True, which is not text"),
        ("max_staleness: true", "max_staleness = True: it is a number, and YAML reads yes"),
        ("granularity: {actor: yes}", "granularity: actor = True: it is a number"),
        ("placement: {rollout: on}", "placement.rollout = True: it has settings, so write placement.rollout.devices="),
        ("tail: overs", "tail = 'overs': write none, oversample, tail_batching, migrate, or settings with their kind"),
        ("tail: {prompts: 2}", "tail: write none, oversample, tail_batching, migrate, or settings with their kind"),
        ("tail: {kind: oversample, prompt: 2}", "unknown key 'tail.prompt'. Did you mean 'prompts'?"),
        ("tail: {kind: migrate, batch: 0}", "mine.yaml: tail.batch = 0: it must be 1 or more"),
    ],
)
def test_what_a_file_gets_wrong_is_a_sentence(
    text: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as raised:
        load_schedule("mine.yaml")
    assert reason in str(raised.value)


def test_a_tail_of_another_kind_takes_nothing_over_from_the_preset() -> None:
    given: dict[str, object] = {"kind": "oversample", "prompts": 1.5}
    assert load_schedule("rollpacker", {"tail": given}).tail == Oversample(prompts=1.5)
    same = load_schedule("rollpacker", {"tail": {"kind": "tail_batching", "prompts": 1.5}}).tail
    assert same == TailBatching(prompts=1.5)


def test_a_device_is_a_number_wherever_devices_are_named() -> None:
    short, long = Schedule.parse({"placement": 0}), {"devices": 0, "devices_per_instance": 1}
    assert short.placement.of("actor").devices == short.placement.of("rollout").devices == "0"
    assert Schedule.parse({"placement": {"actor": long}}).placement.of("actor").devices == "0"
