"""Fields are validated together: what cannot work is refused with the reason, before anything runs."""

from pathlib import Path

import pytest

from interlace.core.errors import UserError
from interlace.schedule.presets import load_schedule
from interlace.schedule.schedule import Schedule


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"pipeline_depth": 2, "max_staleness": 1}, "further ahead than any sample may be stale"),
        ({"tail": "oversample", "max_staleness": 1}, "needs max_staleness 0 and sync_every 1"),
        ({"tail": "tail_batching", "sync_every": 2}, "needs max_staleness 0 and sync_every 1"),
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
