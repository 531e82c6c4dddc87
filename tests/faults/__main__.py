"""Injects all faults, or given families or names, and prints each result: `python -m tests.faults`."""

import argparse
import importlib
import pkgutil
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tests.faults
from tests.faults.lab import Fault, Lab, Shared


@dataclass(frozen=True)
class Row:
    """What came of a fault."""

    family: str
    name: str
    seconds: float
    failure: str
    """Empty where all was as promised."""


def families() -> dict[str, Sequence[Fault]]:
    """By module: each that has a list FAULTS is one."""
    found = {}
    for module in pkgutil.iter_modules(tests.faults.__path__):
        if module.name != "__main__":
            faults = getattr(importlib.import_module(f"tests.faults.{module.name}"), "FAULTS", None)
            if faults:
                found[module.name] = faults
    return found


def attempt(family: str, fault: Fault, shared: Shared) -> Row:
    start_s = time.monotonic()
    with tempfile.TemporaryDirectory(dir=shared.root, ignore_cleanup_errors=True) as folder:
        try:
            fault.check(Lab(Path(folder), shared))
            failure = ""
        except Exception as error:
            failure = f"{error}" if isinstance(error, AssertionError) else traceback.format_exc()
    row = Row(family, fault.name, time.monotonic() - start_s, failure)
    verdict = "as promised" if not failure else "NOT AS PROMISED"
    print(f"{row.family:9}  {row.name:60.60}  {row.seconds:6.1f} s  {verdict}", flush=True)
    return row


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--family", action="append", help="one of them; may be repeated. Default: all")
    parser.add_argument("--only", default="", help="those with this in their name")
    parser.add_argument("--jobs", type=int, default=2, help="how many are tried at once")
    options = parser.parse_args()
    known = families()
    if unknown := set(options.family or ()) - known.keys():
        parser.error(f"no family {', '.join(unknown)}; there are {', '.join(known)}")
    chosen = [
        (family, fault)
        for family, faults in known.items()
        if not options.family or family in options.family
        for fault in faults
        if options.only in fault.name
    ]
    with tempfile.TemporaryDirectory(prefix="faults-", ignore_cleanup_errors=True) as root:
        shared = Shared(Path(root))
        with ThreadPoolExecutor(options.jobs) as pool:
            rows = list(pool.map(lambda pair: attempt(*pair, shared), chosen))
    for row in rows:
        if row.failure:
            print(f"\n{row.family}: {row.name}\n{row.failure}")
    good = sum(not row.failure for row in rows)
    print(f"\n{good} of {len(rows)} as promised")
    return 0 if good == len(rows) else 1


if __name__ == "__main__":
    sys.exit(main())
