"""`interlace`: the commands, and how their errors are shown."""

import functools
import io
import sys
from collections.abc import Callable
from typing import Any, ParamSpec

import typer
import typer.core

from interlace.cli.compare import compare
from interlace.cli.doctor import doctor
from interlace.cli.engines import engines
from interlace.cli.eval import evaluate
from interlace.cli.plan import plan
from interlace.cli.presets import presets
from interlace.cli.profile import profile
from interlace.cli.recipes import recipes
from interlace.cli.report import report
from interlace.cli.serve import serve
from interlace.cli.simulate import simulate
from interlace.cli.train import train
from interlace.core.errors import InterlaceError, UserError, is_full_disk

BAD_INPUT, FAILED = 2, 1
P = ParamSpec("P")


def _reporting(command: Callable[P, None]) -> Callable[P, None]:
    """Wraps the command, its errors shown as sentences and not as tracebacks."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        if isinstance(sys.stdout, io.TextIOWrapper):
            # A response may hold any character, and one that this output cannot show must not end a run.
            sys.stdout.reconfigure(errors="backslashreplace")
        try:
            command(*args, **kwargs)
        except InterlaceError as error:
            for line in (f"error: {error}", *getattr(error, "__notes__", ())):
                print(line, file=sys.stderr)
            raise typer.Exit(BAD_INPUT if isinstance(error, UserError) else FAILED) from None
        except OSError as error:
            if not is_full_disk(error):
                raise
            where = f" ({error.filename})" if error.filename else ""
            print(f"error: the disk is full{where}. Make room, then give the command again.", file=sys.stderr)
            raise typer.Exit(BAD_INPUT) from None

    return run


class _WithSettings(typer.core.TyperCommand):
    """A command whose settings are given as key=value: says so where one was given as an option."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments as any command does, after a look at options that are none."""
        known = {"--help", *(name for parameter in self.params for name in parameter.opts)}
        for place, given in enumerate(args):
            option, equals, value = given.partition("=")
            if option.startswith("--") and option not in known and (key := _setting(option)):
                value = value if equals else next(iter(args[place + 1 :]), "...")
                print(f"error: {option} is no option: settings are given as {key}={value}", file=sys.stderr)
                raise typer.Exit(BAD_INPUT)
        return super().parse_args(ctx, args)


def _setting(option: str) -> str:
    """Returns the setting that an option is called after; empty where there is none."""
    from interlace.recipes.config import Recipe

    key = option.removeprefix("--").replace("-", "_")
    return key if key.partition(".")[0] in Recipe.model_fields else ""


app = typer.Typer(
    help="Reinforcement-learning post-training: the flow is written once, the way it runs is data.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("train", cls=_WithSettings)(_reporting(train))
app.command("eval")(_reporting(evaluate))
app.command("compare")(_reporting(compare))
app.command("serve")(_reporting(serve))
app.command("engines")(_reporting(engines))
app.command("simulate")(_reporting(simulate))
app.command("report")(_reporting(report))
app.command("profile")(_reporting(profile))
app.command("doctor")(_reporting(doctor))
app.command("recipes")(_reporting(recipes))
app.command("plan", cls=_WithSettings)(_reporting(plan))
app.command("presets")(_reporting(presets))
