"""The public names and signatures as lines of text. Run as a script, it rewrites the stored list."""

import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path

PINNED = Path(__file__).with_name("public_names.txt")
MODULES = (
    "interlace",
    "interlace.core.config",
    "interlace.core.errors",
    "interlace.core.plugins",
    "interlace.core.random",
    "interlace.core.training",
    "interlace.core.types",
    "interlace.engines.rollout.protocol",
    "interlace.algorithms.base",
)


def public_names() -> list[str]:
    return [line for module in MODULES for line in _lines(importlib.import_module(module))]


def _lines(module: types.ModuleType) -> Iterator[str]:
    """A package that imports its names when they are used lists them in __all__."""
    listed = {name: getattr(module, name) for name in getattr(module, "__all__", ())}
    for name, value in sorted({**vars(module), **listed}.items()):
        own = name in listed or getattr(value, "__module__", module.__name__) == module.__name__
        if name in listed and isinstance(value, types.ModuleType):
            yield f"{module.__name__}.{name}({', '.join(inspect.signature(value).parameters)})"  # type: ignore[arg-type]
        if name.startswith("_") or isinstance(value, types.ModuleType) or not own:
            continue
        if inspect.isclass(value):
            yield f"{module.__name__}.{name}"
            yield from _members(f"{module.__name__}.{name}", value)
        elif inspect.isfunction(value):
            yield f"{module.__name__}.{name}({', '.join(inspect.signature(value).parameters)})"


def _members(prefix: str, cls: type) -> Iterator[str]:
    fields = {name for name in inspect.get_annotations(cls) if not name.startswith("_")}
    yield from (f"{prefix}.{name}:" for name in sorted(fields))
    for name, value in sorted(vars(cls).items()):
        if name.startswith("_") or name in fields:
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function):
            yield f"{prefix}.{name}({', '.join(inspect.signature(function).parameters)})"
        elif isinstance(value, property):
            yield f"{prefix}.{name}"


if __name__ == "__main__":
    PINNED.write_text("\n".join(public_names()) + "\n", encoding="utf-8")
