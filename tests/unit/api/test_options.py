"""Each command that has a Python form has the same options by the same names."""

import inspect
from collections.abc import Callable, Mapping

import pytest
import typer.main

import interlace
from interlace.api.advice import ARGUMENTS
from interlace.api.run import TrainedRun
from interlace.cli.main import app

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]  # a group
FORMS: Mapping[str, Callable[..., object]] = {
    "train": interlace.train,
    "simulate": interlace.simulate,
    "plan": interlace.plan,
    "profile": interlace.profile,
    "compare": interlace.compare,
    "sweep": interlace.sweep,
    "serve": interlace.serve,
    "eval": interlace.evaluate,
    "lm-eval": interlace.lm_eval_model,
    "export": TrainedRun.export,
    "report": TrainedRun.report,
}
WITHOUT_FORM = {
    "supervise", "engines", "scale", "advise", "watch", "record", "doctor", "chaos", "init", "recipes", "presets"
}  # fmt: skip
"""Commands about processes, machines, files or other runs than the program's own."""
ONLY_COMMAND = {
    ("*", "json"): "form of the output; the function returns an object",
    ("train", "dry_run"): "interlace.dry_run, which returns sizes instead of a run",
    ("train", "devices"): "of a dry run",
    ("lm-eval", "options"): "options of lm_eval, whose simple_evaluate() takes them",
    ("export", "run"): "the object",
    ("export", "checkpoint"): "load_run(checkpoint=) chooses it",
    ("export", "public"): "private, because a default of True is no option of a command",
    ("report", "runs"): "the object",
}
"""Options and arguments that the Python form does not have, and the reason."""
ONLY_PYTHON = {
    ("*", "quiet"): "progress is shown unless the command prints JSON",
    ("*", "folder"): "folder of the runs; the one of a command is runs/",
    ("*", "self"): "the run",
    ("train", "model"): "object of the program",
    ("train", "tokenizer"): "object of the program",
    ("train", "data"): "object of the program",
    ("train", "reward"): "object of the program",
    ("train", "columns"): "of data",
    ("train", "heldout_size"): "of data",
    ("train", "callbacks"): "functions of the program",
    ("train", "settings"): "settings as keywords, which are overrides on the command line",
    ("sweep", "overrides"): "fixed settings, which are among the settings on the command line",
    ("lm-eval", "overrides"): "among the options on the command line",
    ("lm-eval", "device"): "among the options on the command line",
    ("export", "private"): "see public",
    ("export", "token"): "of the hub; a secret has no place on a command line",
}


def name_options(command: str) -> set[str]:
    """Returns the names of the arguments, and those of the options without dashes."""
    return {
        each.opts[0].removeprefix("--").replace("-", "_") if each.param_type_name == "option" else str(each.name)
        for each in COMMANDS[command].params
    }


@pytest.mark.parametrize("command", [*FORMS])
def test_a_function_has_the_options_of_its_command(command: str) -> None:
    options, parameters = name_options(command), {*inspect.signature(FORMS[command]).parameters}
    missing = {each for each in options - parameters if not {(command, each), ("*", each)} & {*ONLY_COMMAND}}
    assert not missing, f"the Python form of `interlace {command}` lacks them"
    further = {each for each in parameters - options if not {(command, each), ("*", each)} & {*ONLY_PYTHON}}
    assert not further, f"`interlace {command}` lacks them"


def test_errors_write_each_shared_option_as_an_argument() -> None:
    shared = {
        each for command in FORMS for each in name_options(command) & {*inspect.signature(FORMS[command]).parameters}
    }
    positional = {"overrides", "run_or_model", "model_or_run", "settings"}
    assert {each.replace("-", "_") for each in ARGUMENTS} - {"device"} == shared - positional, (
        "device: an option of lm_eval"
    )


def test_each_command_has_a_form_or_is_listed() -> None:
    assert {*FORMS} | WITHOUT_FORM == {*COMMANDS} and not {*FORMS} & WITHOUT_FORM
    dry, train = inspect.signature(interlace.dry_run).parameters, inspect.signature(interlace.train).parameters
    assert {*dry} - {*train} == {"devices"}
    assert {*train} - {*dry} == {"name", "folder", "resume", "overwrite", "callbacks", "quiet"}
    for forms in (ONLY_COMMAND, ONLY_PYTHON):
        for command, option in forms:
            names = [name_options(each) | {*inspect.signature(FORMS[each]).parameters} for each in FORMS]
            assert command != "*" or any(option in each for each in names), f"{option} is no option any more"
            assert command == "*" or option in names[[*FORMS].index(command)], f"{command} has no {option} any more"
