"""`interlace lm-eval`: tasks of lm-evaluation-harness against a run, a model or a server."""

import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from interlace.cli.preflight import disable_progress_bars
from interlace.core.errors import UserError

if TYPE_CHECKING:
    from interlace.core.types import JSON
    from interlace.run.lm_eval import EngineLM

NAME = "interlace"
"""Name of the model in the harness's results."""
KEY_ENV = "INTERLACE_ADMIN_KEY"
_OURS = ("--model", "-M", "--model_args", "-a")
"""Options of the harness that this command sets."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LMSource:
    """A run, a model or a server, and its options."""

    spec: str
    """A run, a checkpoint, any model, or http://HOST:PORT of a server."""
    overrides: Sequence[str] = ()
    checkpoint: str | int = "newest"
    tokenizer: str | None = None
    """Tokenizer for a server. If None, the model that the server reports."""
    dialect: str = "interlace"
    """API of the server: interlace, vllm or sglang."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Opened:
    """Entry in the harness's list of models for a model that is open already."""

    model: "EngineLM"

    def create_from_arg_obj(
        self, arg_dict: "Mapping[str, JSON]", additional_config: "Mapping[str, JSON]"
    ) -> "EngineLM":
        del arg_dict, additional_config
        return self.model

    def create_from_arg_string(self, arg_string: str, additional_config: "Mapping[str, JSON]") -> "EngineLM":
        del arg_string, additional_config
        return self.model


def lm_eval(
    model_or_run: Annotated[str, typer.Argument(help="A run, a checkpoint, any model, or http://HOST:PORT.")],
    options: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]... [OPTIONS]...",
            help="Settings of the engine, then options of lm_eval: --tasks gsm8k --num_fewshot 5 --limit 100.",
        ),
    ] = None,
    checkpoint: Annotated[str, typer.Option(help="Of a run: newest, best (by its `best`), a step, or a folder.")] = (
        "newest"
    ),
    tokenizer: Annotated[
        str | None, typer.Option(help="Tokenizer for a server. Default: of the model that it reports.")
    ] = None,
    dialect: Annotated[str, typer.Option(help="API of a server: interlace, vllm, sglang.")] = "interlace",
) -> None:
    """Evaluate tasks of lm-evaluation-harness. A server's key is read from INTERLACE_ADMIN_KEY."""
    given = options or []
    first = next((place for place, each in enumerate(given) if each.startswith("-")), len(given))
    overrides, rest = given[:first], given[first:]
    for each in rest:
        if each.partition("=")[0] in _OURS:
            raise UserError(f"{each} is set by this command: name the run, the model or the server as its argument.")
    if not rest:
        raise UserError("name tasks of lm-evaluation-harness, such as --tasks gsm8k; `lm_eval ls tasks` lists them.")
    joined = next((each.partition("=")[2] for each in rest if each.startswith("--device=")), None)
    device = next((rest[place + 1] for place, each in enumerate(rest[:-1]) if each == "--device"), joined)
    source = LMSource(
        spec=model_or_run, overrides=overrides, checkpoint=checkpoint, tokenizer=tokenizer, dialect=dialect
    )
    model = open_lm(source, device=device)
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.registry import model_registry

    model_registry.register(NAME, target=_Opened(model=model))
    arguments, sys.argv = sys.argv, ["lm_eval", "run", "--model", NAME, "--model_args", _describe_source(source), *rest]
    try:
        cli_evaluate()
    finally:
        sys.argv = arguments
        model.close()


def open_lm(source: LMSource, *, device: str | None = None) -> "EngineLM":
    """Opens a run, a model or a server as a model of the harness. Raises UserError before any work starts.

    device: of a run or model, as torch names it; None for a GPU if the run's cluster has one, else the CPU.
    """
    from interlace.cli.serve import make_served_recipe

    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("tasks of lm-evaluation-harness need its package: pip install 'interlace[lm-eval]'.")
    disable_progress_bars()
    from interlace.run.best import NEWEST

    if source.spec.startswith(("http://", "https://")):
        from interlace.engines.rollout.services.protocol import Address
        from interlace.run.lm_eval import open_server

        if source.overrides:
            raise UserError(f"{source.overrides[0]}: settings of the engine belong to the command of the server.")
        if str(source.checkpoint) != NEWEST:
            raise UserError(f"--checkpoint {source.checkpoint} is of a run, and a server has one model. Leave it out.")
        address = Address(url=source.spec, key=os.environ.get(KEY_ENV, ""))
        return open_server(address, dialect=source.dialect, tokenizer=source.tokenizer)
    if source.tokenizer is not None:
        raise UserError("--tokenizer is for a server. A model has its own; another one is set by model.tokenizer=PATH.")
    if source.dialect != "interlace":
        raise UserError(f"--dialect {source.dialect} is for a server. Leave it out.")
    recipe = make_served_recipe(source.spec, source.overrides, source.checkpoint)
    from interlace.run.lm_eval import open_recipe  # loads torch, so a mistake is refused before it

    return open_recipe(recipe, device=device)


def _describe_source(source: LMSource) -> str:
    """Returns the source as the harness records it; commas separate arguments, so they are written as spaces."""
    return f"pretrained={source.spec.replace(',', ' ')},checkpoint={str(source.checkpoint).replace(',', ' ')}"
