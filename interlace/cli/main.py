"""`interlace`: registers the commands and prints their errors."""

import functools
import io
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer
import typer.core

from interlace.cli.advise import advise
from interlace.cli.chaos import chaos
from interlace.cli.compare import compare
from interlace.cli.doctor import doctor
from interlace.cli.engines import engines, scale
from interlace.cli.eval import evaluate
from interlace.cli.export import export
from interlace.cli.init import init
from interlace.cli.lm_eval import lm_eval
from interlace.cli.plan import plan
from interlace.cli.preflight import note_start
from interlace.cli.presets import presets
from interlace.cli.profile import profile
from interlace.cli.recipes import recipes
from interlace.cli.record import record
from interlace.cli.report import report
from interlace.cli.serve import serve
from interlace.cli.simulate import simulate
from interlace.cli.supervise import supervise
from interlace.cli.sweep import sweep
from interlace.cli.train import train
from interlace.cli.watch import watch
from interlace.core.errors import InterlaceError, UserError, is_full_disk, nearest
from interlace.core.recovery import Cause, cause_of

BAD_INPUT, FAILED = 2, 1
P = ParamSpec("P")


def _print_errors(command: Callable[P, None]) -> Callable[P, None]:
    """Wraps a command so that its errors are printed as sentences, not as tracebacks."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A response may contain a character that the terminal cannot show, which must not end a run.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            command(*args, **kwargs)
        except InterlaceError as error:
            cause = cause_of(error)
            shown = () if cause == Cause.USER else (f"cause: {cause}",)
            for line in (f"error: {error}", *shown, *getattr(error, "__notes__", ())):
                print(line, file=sys.stderr)
            raise typer.Exit(BAD_INPUT if isinstance(error, UserError) else FAILED) from None
        except OSError as error:
            if not is_full_disk(error):
                raise
            where = f" ({error.filename})" if error.filename else ""
            print(f"error: the disk is full{where}. Free some space, then repeat the command.", file=sys.stderr)
            print(f"cause: {cause_of(error)}", file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from None

    return run


class _WithSettings(typer.core.TyperCommand):
    """Command with settings written key=value. It refuses a setting that is written as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments after a check for settings among the options."""
        known = {"--help", *(name for parameter in self.params for name in parameter.opts)}
        for place, given in enumerate(args):
            option, equals, value = given.partition("=")
            if option.startswith("--") and option not in known and (key := _find_setting(option)):
                value = value if equals else next(iter(args[place + 1 :]), "...")
                print(f"error: {option} is not an option: settings are written {key}={value}", file=sys.stderr)
                raise typer.Exit(BAD_INPUT)
        return super().parse_args(ctx, args)


def _find_setting(option: str) -> str:
    """Returns the setting with the name of an option, or an empty text."""
    from interlace.run.recipe.config import Recipe

    key = option.removeprefix("--").replace("-", "_")
    return key if key.partition(".")[0] in Recipe.model_fields else ""


class _Commands(typer.core.TyperGroup):
    """Group of all commands. For an unknown command it suggests only similar names."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:  # house: the signature is typer's
        """Returns the command. Ends with exit code 2 if it is unknown."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            print(f"error: unknown command {args[0]!r}.{nearest(args[0], self.commands)}", file=sys.stderr)
            raise typer.Exit(BAD_INPUT)
        return super().resolve_command(ctx, args)


class _App(typer.Typer):
    """The command line as a program. Its commands may count the start of the process in limits of their time."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # house: the signature is typer's
        note_start()
        return super().__call__(*args, **kwargs)


app = _App(
    cls=_Commands,
    help="Reinforcement-learning post-training: the flow is written once, the way it runs is data.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.command("init")(_print_errors(init))
app.command("train", cls=_WithSettings)(_print_errors(train))
app.command("supervise", cls=_WithSettings)(_print_errors(supervise))
app.command("eval")(_print_errors(evaluate))
app.command("lm-eval", context_settings={"ignore_unknown_options": True})(_print_errors(lm_eval))
app.command("compare")(_print_errors(compare))
app.command("export")(_print_errors(export))
app.command("serve")(_print_errors(serve))
app.command("engines")(_print_errors(engines))
app.command("scale")(_print_errors(scale))
app.command("simulate")(_print_errors(simulate))
app.command("advise")(_print_errors(advise))
app.command("report")(_print_errors(report))
app.command("watch")(_print_errors(watch))
app.command("record", cls=_WithSettings)(_print_errors(record))
app.command("profile")(_print_errors(profile))
app.command("doctor")(_print_errors(doctor))
app.command("recipes")(_print_errors(recipes))
app.command("chaos", cls=_WithSettings)(_print_errors(chaos))
app.command("sweep", cls=_WithSettings)(_print_errors(sweep))
app.command("plan", cls=_WithSettings)(_print_errors(plan))
app.command("presets")(_print_errors(presets))
