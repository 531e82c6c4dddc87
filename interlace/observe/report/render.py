"""Templates, styles and scripts of a page."""

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def asset(name: str) -> str:
    """Reads a style or a script of the package."""
    return (files("interlace.observe.report") / "assets" / name).read_text(encoding="utf-8")


def render_template(template: str, context: Mapping[str, object]) -> str:
    """Renders a template of the page."""
    return _make_environment().get_template(template).render(context)


def format_metric(value: float, name: str) -> str:
    """Formats a value of a metric; bytes as MiB."""
    return f"{value / 2**20:.4g} MiB" if name.startswith("memory/") else f"{value:.5g}"


@cache
def _make_environment() -> "Environment":
    from jinja2 import Environment, PackageLoader, StrictUndefined

    found = Environment(
        loader=PackageLoader("interlace.observe.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["percent"] = lambda share, digits=1: f"{share:.{digits}%}"
    found.filters["short_number"] = lambda value: "-" if value is None else f"{value:.5g}"
    found.filters["metric_value"] = format_metric
    return found
