"""References of objects in Ray's store arrive before or after the messages that name the objects."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("ray")
from interlace.runtime.ray.references import _References


@dataclass(eq=False)
class Table:
    """Object of a message."""

    key: str
    ref: Any = None


def test_an_object_gets_the_reference_that_arrives_before_or_after_it() -> None:
    references, objects = _References(), [Table("a"), Table("a"), Table("b")]
    references.take({"a": ["first"]})
    for each in objects:
        references.find(each)
    assert [each.ref for each in objects] == ["first", None, None]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(references.wait_for, objects[1])
        references.take({"b": ["other"], "a": ["second"]})
        assert waiting.result(timeout=60) == "second"
    assert objects[2].ref == "other" and not references.missing


def test_an_object_without_a_reference_that_follows_is_not_awaited() -> None:
    assert _References().wait_for(Table("a")) is None
