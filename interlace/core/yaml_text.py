"""Reading and writing of YAML. Values that YAML 1.1 reads in an unexpected way are read as intended, or refused."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from interlace.core.errors import UserError, nearest

if TYPE_CHECKING:
    from interlace.core.types import JSON  # loads numpy, which the command line does without

_UNREADABLE = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")
"""Characters that YAML does not allow in a text, or reads as the end of a line."""
_TEXT_TAG = "tag:yaml.org,2002:str"
_NUMBER_TAGS = ("tag:yaml.org,2002:int", "tag:yaml.org,2002:float")
_OCTAL = re.compile(r"[-+]?0[0-7_]+")
_MAX_NODES = 10_000
"""Maximum number of values of a text after each alias is replaced by the value of its anchor."""
_MAX_REASON = 1000
"""Maximum number of characters of a parser's message that an error contains."""


class _Loader(yaml.SafeLoader):
    """Reads 1e-4 as a number, which YAML 1.1 reads as text, and 1:30 as text, which it reads as 90. Refuses numbers
    such as 010, which it reads as 8, duplicate keys, keys that are not text, values that Python cannot represent, and
    aliases that expand to too many values."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._num_aliases = 0

    def get_single_node(self) -> yaml.Node | None:
        node: yaml.Node | None = super().get_single_node()
        if node is not None and self._num_aliases:
            _count_values(node, {})
        return node

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self._num_aliases += self.check_event(yaml.AliasEvent)
        return super().compose_node(parent, index)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Returns a mapping as it is written: its construction joins the keys of a merge (<<) with its own."""
        node: yaml.MappingNode = super().compose_mapping_node(anchor)
        names: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key.value, str)):
            if key.value in names:
                problem = f"key {key.value!r:.80} is written twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            names.add(key.value)
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        is_number = node.tag in _NUMBER_TAGS and isinstance(node, yaml.ScalarNode)
        if is_number and ":" in node.value:
            node.tag = _TEXT_TAG
        elif is_number and _OCTAL.fullmatch(node.value):
            problem = f"{node.value:.40} is octal in YAML: write the number without the first 0, or a text in quotes"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:
            value = node.value if isinstance(node.value, str) else ""
            problem = f"{value[:40]}{'...' if len(value) > 40 else ''} cannot be read: {str(error)[:200]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = super().construct_mapping(node, deep)
        if (other := next((key for key in found if not isinstance(key, str)), None)) is not None:
            problem = f"a key reads as {other!r:.80}, which is not text: put it in quotes"
            mark = next((key.start_mark for key, _ in node.value if key.tag != _TEXT_TAG), node.start_mark)
            raise yaml.constructor.ConstructorError(None, None, problem, mark)
        return found


def _count_values(node: yaml.Node, counts: dict[int, int]) -> int:
    """Returns the number of values of a node, with its aliases expanded. counts: counts of earlier nodes, by id."""
    if (seen := counts.get(id(node))) is not None:
        return seen
    counts[id(node)] = _MAX_NODES + 1  # found again inside itself: the value is endless
    inner = node.value if isinstance(node, yaml.CollectionNode) else ()
    nodes = [each for item in inner for each in (item if isinstance(item, tuple) else (item,))]
    count = 1 + sum(_count_values(each, counts) for each in nodes)
    if count > _MAX_NODES:
        problem = f"its aliases expand to more than {_MAX_NODES} values"
        raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark)
    counts[id(node)] = count
    return count


class _Dumper(yaml.SafeDumper):
    """Quotes the texts that _Loader would read as another type."""


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


def read_mapping(path: Path, subject: str = "", *, remedy: str = "", may_be_empty: bool = False) -> "dict[str, JSON]":
    """Reads a YAML or JSON file that contains a mapping.

    subject: kind and name of the file, for messages, such as `market 'spot'`; empty for a file that its path describes.
    remedy: sentence that ends each message. may_be_empty: an empty file is an empty mapping. Raises UserError if the
    file cannot be read, is not YAML, or contains another value.
    """
    file = f"{subject} ({path})" if subject else str(path)
    try:
        found = parse_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror or error}. {remedy}".rstrip()) from None
    except (ValueError, yaml.YAMLError) as error:
        form = "JSON" if path.suffix == ".json" else "YAML"
        raise UserError(f"{file} is not {form}: {str(error)[:_MAX_REASON]}\n{remedy}".rstrip()) from None
    if found is None and may_be_empty:
        return {}
    if not isinstance(found, dict):
        given = "is empty" if found is None else f"is a {type(found).__name__}"
        end = remedy or "Write one `key: value` on each line."
        raise UserError(f"{file} contains no settings: it {given}. {end}")
    return found


def to_yaml(data: Any, *, flow: bool | None = False, width: int = 80) -> str:
    """Writes text for parse_yaml(), with keys in order. flow: brackets for all collections; if None, for inner ones."""
    return yaml.dump(data, None, _Dumper, sort_keys=False, allow_unicode=True, default_flow_style=flow, width=width)


def to_json_text(value: object) -> str:
    """Returns a value as JSON that YAML reads as the same value. Raises TypeError for an object without a form in JSON.

    JSON's own escapes of characters beyond the first plane are two halves in YAML, and YAML allows no control
    characters in a text.
    """
    return _UNREADABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(value, ensure_ascii=False))


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a text that is longer than the name of a file may be
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class YamlFiles:
    """Shipped files, by their names, and a user's files, by their paths."""

    kind: str
    """Kind of the files, for messages: recipe, schedule."""
    folder: Path

    def names(self) -> list[str]:
        return sorted(path.stem for path in self.folder.glob("*.yaml"))

    def path(self, spec: str) -> Path:
        """Returns the path of a shipped name, or of a user's file that ends in .yaml. Raises UserError."""
        if spec.endswith((".yaml", ".yml")):
            path = Path(spec).expanduser()
            if not _is_file(path):
                raise UserError(
                    f"{self.kind} {spec!r:.200}: there is no such file (looked in {path.parent.resolve()})."
                )
            return path
        if spec not in self.names():
            own = "Your own is written as a path to a YAML file."
            for file in (f"{spec}.yaml", f"{spec}/config.yaml"):  # the latter in the folder of a run
                if _is_file(Path(file)):
                    raise UserError(f"unknown {self.kind} {spec!r}. Did you mean the file {file!r}?")
            raise UserError(f"unknown {self.kind} {spec!r:.200}.{nearest(spec, self.names())} {own}")
        return self.folder / f"{spec}.yaml"

    def read(self, spec: str, *, may_be_empty: bool = False) -> "dict[str, JSON]":
        """Returns the settings in a file. Raises UserError if it does not exist; see also read_mapping()."""
        return read_mapping(self.path(spec), f"{self.kind} {spec!r}", may_be_empty=may_be_empty)
