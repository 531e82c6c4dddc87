"""Prints the requirements of a separate test environment, for `pip install --requirement`.

The list contains the dependencies of interlace and the test tools, read from pyproject.toml.
"""

import argparse
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
TEST_TOOLS = ("pytest", "hypothesis")


def list_requirements(distribution: str, extras: list[str]) -> Iterator[str]:
    """Yields the requirements of interlace, of its extras, of the test tools and of an installed distribution."""
    optional = PROJECT["optional-dependencies"]
    yield from PROJECT["dependencies"]
    yield from (line for extra in extras for line in optional[extra])
    yield from (line for line in optional["dev"] if line.startswith(TEST_TOOLS))
    if distribution:
        yield from (line for line in requires(distribution) or () if "extra ==" not in line)


def read_name(requirement: str) -> str:
    """Returns the package that a requirement names."""
    match = re.match(r"[\w.-]+", requirement)
    assert match, requirement
    return match.group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--of", default="", help="add the requirements of this installed distribution")
    parser.add_argument("--extra", action="append", default=[], help="add this extra of interlace; may be repeated")
    parser.add_argument("--without", action="append", default=[], help="leave out this package; may be repeated")
    parser.add_argument("--only-extras", action="store_true", help="neither interlace's dependencies nor test tools")
    options = parser.parse_args()
    optional = PROJECT["optional-dependencies"]
    extras = [requirement for extra in options.extra for requirement in optional[extra]]
    for requirement in extras if options.only_extras else list_requirements(options.of, options.extra):
        if read_name(requirement) not in options.without:
            print(requirement)


if __name__ == "__main__":
    main()
