"""Finding a part by name: built-ins are modules of a folder, a user's own is `package.module:Name`."""

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from interlace.core.errors import UserError, nearest

T = TypeVar("T")


def builtin_names(package: ModuleType, *, hidden: tuple[str, ...] = ("base",)) -> list[str]:
    """Names of the modules in a package's folder, sorted; a leading underscore or a name in `hidden` is left out."""
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if not name.startswith("_") and name not in hidden)


def builtin_module(kind: str, package: ModuleType, name: str, *, hidden: tuple[str, ...] = ("base",)) -> ModuleType:
    """Imports the module of a built-in part. kind: what it is, for the message. Raises UserError naming the nearest."""
    names = builtin_names(package, hidden=hidden)
    if name not in names:
        own = " Your own is written package.module:Name."
        raise UserError(f"unknown {kind} {name!r}.{nearest(name, names)}{own}")
    return importlib.import_module(f"{package.__name__}.{name}")


def load_object(kind: str, spec: str) -> object:
    """Loads the object that `package.module:Name` names. The current folder is importable, as with `python -m`.

    Raises UserError where the module or the name in it is not there, or the module itself raises.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UserError(f"{kind} {spec!r} is not of the form package.module:Name.")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"{kind} {spec!r}: cannot import {module_name!r}: {error}.") from error
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error}"
        raise UserError(f"{kind} {spec!r}: cannot import {module_name!r}: {_line(error)} raises {raised}.") from error
    if not hasattr(module, attribute):
        names = [name for name, value in vars(module).items() if _is_own(name, value, module)]
        raise UserError(f"{kind} {spec!r}: module {module_name!r} has no {attribute!r}.{nearest(attribute, names)}")
    return getattr(module, attribute)


def _is_own(name: str, value: object, module: ModuleType) -> bool:
    """Returns whether a module itself defines what it holds under a name, so that the name may be meant."""
    return not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def _line(error: BaseException) -> str:
    """Returns the place where an error was raised: `file.py, line 3,`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno},"


def load_callable(kind: str, spec: str) -> Callable[..., object]:
    """Loads like load_object, refusing an object that cannot be called."""
    found = load_object(kind, spec)
    if not callable(found):
        raise UserError(f"{kind} {spec!r} is a {type(found).__name__}, not something that can be called.")
    return found


def concrete_subclass(what: str, found: object, base: type[T]) -> type[T]:
    """Returns a subclass of `base` that leaves nothing out. Raises UserError, naming `what`, for anything else."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{what} is not a subclass of {base.__name__}, of {base.__module__}.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise UserError(f"{what} lacks {missing}: to be defined in the class.")
    return found
