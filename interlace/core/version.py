"""Version of the package, and of others that are installed."""

from collections.abc import Iterable

VERSION = "0.2.0"


def find_versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the versions of those packages that are installed, by name."""
    from importlib import metadata  # its import takes 20 ms, and every command imports this module

    found = {}
    for name in packages:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
