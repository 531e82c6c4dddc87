"""Settings that people write, as YAML: what YAML 1.1 reads otherwise than it was meant is read so, or refused."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from interlace.core.errors import UserError, nearest


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, which YAML 1.1 takes for text; refuses a key that is written twice, or is no text."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is written twice", node.start_mark)
        found = super().construct_mapping(node, deep)
        if (other := next((key for key in found if not isinstance(key, str)), None)) is not None:
            problem = f"a key reads as {other!r}, which is no text: put it in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        return found


class _Dumper(yaml.SafeDumper):
    """Puts in quotes what _Loader would not read as text."""


for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+$"), list("-+0123456789")
    )


def parse_yaml(text: str) -> Any:
    """Returns the contents of the text. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise yaml.YAMLError("its brackets or lists are nested too deeply to be read") from None


def to_yaml(data: Any, *, flow: bool | None = False, width: int = 80) -> str:
    """Writes text for parse_yaml(); keys keep their order. flow: brackets for all collections; None: for inner ones."""
    return yaml.dump(data, None, _Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=width)


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlFiles:
    """Shipped files, by their names, and a user's own, by their paths."""

    kind: str
    """Kind of the files, for messages: recipe, schedule."""
    folder: Path

    def names(self) -> list[str]:
        """Returns the names of the shipped files, sorted."""
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def path(self, spec: str) -> Path:
        """Returns the file of a shipped name, or a user's own, given as a path that ends in .yaml. Raises UserError."""
        if spec.endswith((".yaml", ".yml")):
            if not Path(spec).is_file():
                looked_in = Path(spec).parent.resolve()
                raise UserError(f"{self.kind} {spec!r}: there is no such file (looked in {looked_in}).")
            return Path(spec)
        if spec not in self.names():
            own = "Your own is written as a path to a YAML file."
            raise UserError(f"unknown {self.kind} {spec!r}.{nearest(spec, self.names())} {own}")
        return self.folder / f"{spec}.yaml"

    def read(self, spec: str) -> Any:
        """Returns the contents of a file. Raises UserError where there is none or it is not YAML."""
        path = self.path(spec)
        try:
            return parse_yaml(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise UserError(f"{self.kind} {spec!r} ({path}) is not YAML: {error}") from None
