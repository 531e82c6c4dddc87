"""Lookup of parts by name: a built-in part is a module of a folder, a user's part is `package.module:Name`.

`find_class` is for folders whose parts are classes: a module is a part if it defines a concrete subclass of the
folder's base class. `find_part` is for folders whose modules are the parts.
"""

import importlib
import inspect
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TypeVar

from interlace.core.errors import UserError, nearest

T = TypeVar("T")
OWN = " Your own is written package.module:Name."


def builtin_names(package: ModuleType, *, hidden: tuple[str, ...] = ("base",)) -> list[str]:
    """Lists the modules of a package's folder, sorted, without private modules and without `hidden`."""
    found = (module.name for module in pkgutil.iter_modules(package.__path__))
    return sorted(name for name in found if not name.startswith("_") and name not in hidden)


def builtin_module(kind: str, package: ModuleType, name: str, *, hidden: tuple[str, ...] = ("base",)) -> ModuleType:
    """Imports the module of a built-in part. Raises UserError with the nearest name if it does not exist.

    kind: noun for the message, such as "reward".
    """
    names = builtin_names(package, hidden=hidden)
    if name not in names:
        raise unknown_name(kind, name, names)
    return importlib.import_module(f"{package.__name__}.{name}")


def find_part(kind: str, package: ModuleType, spec: str, methods: Sequence[str]) -> object:
    """Finds a part whose functions are called: a built-in module, or a class or object of the user.

    A class is called without arguments. methods: the functions that the part must have. Raises UserError.
    """
    if ":" not in spec:
        return builtin_module(kind, package, spec)
    found = load_object(kind, spec)
    part = found() if inspect.isclass(found) else found
    if missing := [name for name in methods if not callable(getattr(part, name, None))]:
        raise UserError(f"{kind} {spec!r} has no {' and no '.join(missing)}: it needs {', '.join(methods)}.")
    return part


def find_class(kind: str, package: ModuleType, spec: str, base: type[T]) -> type[T]:
    """Finds a class by the name of a built-in, or by the user's `package.module:Name`. Raises UserError."""
    if ":" in spec:
        return concrete_subclass(f"{kind} {spec!r}", load_object(kind, spec), base)
    found = _class_in(package, spec, base) if spec in builtin_names(package) else None
    if found is None:
        raise unknown_name(kind, spec, class_names(package, base))
    return found


def class_names(package: ModuleType, base: type) -> list[str]:
    """Lists the modules of a folder that define a concrete subclass of `base`. Imports all modules of the folder."""
    return [name for name in builtin_names(package) if _class_in(package, name, base) is not None]


def _class_in(package: ModuleType, name: str, base: type[T]) -> type[T] | None:
    found = importlib.import_module(f"{package.__name__}.{name}")
    return next((one for one in _classes_of(found) if issubclass(one, base) and not inspect.isabstract(one)), None)


def _classes_of(module: ModuleType) -> Iterator[type]:
    """Yields the public classes that a module defines, without imported ones."""
    for name, value in vars(module).items():
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_"):
            yield value


def unknown_name(kind: str, name: str, names: Sequence[str]) -> UserError:
    """Returns the error for a name that is not among the built-ins. It proposes package.module:Name for a path."""
    module, dot, attribute = name.replace("/", ".").rpartition(".py:" if ".py:" in name else ".")
    if dot and module and attribute.isidentifier() and attribute != "py":
        return UserError(f"unknown {kind} {name!r}. Did you mean '{module}:{attribute}'?{OWN}")
    return UserError(f"unknown {kind} {name!r}.{nearest(name, names)}{OWN}")


def load_object(kind: str, spec: str) -> object:
    """Loads the object that `package.module:Name` names. The current folder is importable, as with `python -m`.

    Raises UserError if the module or the name in it does not exist, or if importing the module raises.
    """
    module_name, _, attribute = spec.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise UserError(f"{kind} {spec!r} is not of the form package.module:Name.")
    if module_name.endswith(".py") or "/" in module_name:
        proposed = module_name.removesuffix(".py").strip("/").replace("/", ".")
        raise UserError(
            f"{kind} {spec!r} is a file; Python modules are written with dots and without .py: {proposed}:{attribute}."
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except (ImportError, SyntaxError) as error:
        raise UserError(f"{kind} {spec!r}: cannot import {module_name!r}: {error}.") from error
    except (Exception, SystemExit) as error:
        raised = f"{type(error).__name__}: {error}"
        raise UserError(
            f"{kind} {spec!r}: cannot import {module_name!r}: {_describe_line(error)} raises {raised}."
        ) from error
    if not hasattr(module, attribute):
        names = [name for name, value in vars(module).items() if _is_own(name, value, module)]
        raise UserError(f"{kind} {spec!r}: module {module_name!r} has no {attribute!r}.{nearest(attribute, names)}")
    return getattr(module, attribute)


def _is_own(name: str, value: object, module: ModuleType) -> bool:
    """Returns whether the name is public and the module defines its value, rather than imports it."""
    return not name.startswith("_") and getattr(value, "__module__", None) == module.__name__


def _describe_line(error: BaseException) -> str:
    """Returns the file and line that raised an error: `file.py, line 3,`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}, line {last.lineno},"


def load_callable(kind: str, spec: str) -> Callable[..., object]:
    """Loads an object as load_object() does. Raises UserError if it cannot be called."""
    found = load_object(kind, spec)
    if not callable(found):
        raise UserError(f"{kind} {spec!r} is a {type(found).__name__}, not something that can be called.")
    return found


def concrete_subclass(what: str, found: object, base: type[T]) -> type[T]:
    """Returns `found` if it is a subclass of `base` without abstract methods. Raises UserError, naming `what`."""
    if not (isinstance(found, type) and issubclass(found, base)):
        raise UserError(f"{what} is not a subclass of {base.__name__}, of {base.__module__}.")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))  # type: ignore[attr-defined]
        raise UserError(f"{what} lacks {missing}: define it in the class.")
    return found
