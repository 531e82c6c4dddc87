"""Settings that people write, as YAML: what YAML 1.1 reads otherwise than it was meant is read so, or refused."""

import re
from typing import Any

import yaml


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


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d[\d_]*(\.[\d_]*)?[eE][-+]?\d+"), list("-+0123456789")
)


def parse_yaml(text: str) -> Any:
    """What the text says. Raises yaml.YAMLError."""
    return yaml.load(text, _Loader)
