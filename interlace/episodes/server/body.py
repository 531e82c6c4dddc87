"""Reading of a request's JSON body: each field has a type, and an error names the field."""

import json
from collections.abc import Mapping, Sequence

from interlace.core.types import JSON
from interlace.episodes.server.errors import ApiError


class Body:
    """The fields of a request's body, or of an object in it."""

    def __init__(self, fields: Mapping[str, JSON], where: str = "") -> None:
        """Wraps the fields of an object. where: the way to the object, for errors."""
        self._fields, self._where = fields, where

    @classmethod
    def parse(cls, content: bytes) -> "Body":
        """Reads a body. ApiError where it is no JSON object."""
        try:
            fields = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise ApiError(400, f"the body is no JSON: {error}.", code="invalid_json") from None
        if not isinstance(fields, dict):
            raise ApiError(400, f"the body is a JSON {type(fields).__name__}; it must be an object.")
        return cls(fields)

    def get(self, name: str) -> JSON:
        """Returns a field as it is; None where it is not there."""
        return self._fields.get(name)

    def wrong(self, name: str, wanted: str) -> ApiError:
        """Makes the error of a field that is not what it has to be."""
        given = json.dumps(self._fields.get(name))[:80]
        return ApiError(400, f"{self._where}{name} = {given}: it must be {wanted}.", param=f"{self._where}{name}")

    def text(self, name: str, default: str = "") -> str:
        """Returns a text."""
        value = self._fields.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(name, "text")
        return value

    def integer(self, name: str, *, least: int = 0) -> int | None:
        """Returns a whole number; None where it is not there."""
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.wrong(name, f"a whole number of at least {least}")
        return value

    def number(self, name: str) -> float | None:
        """Returns a number; None where it is not there."""
        value = self._fields.get(name)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(name, "a number")
        return float(value)

    def flag(self, name: str) -> bool:
        """Returns a truth value; False where it is not there."""
        value = self._fields.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return bool(value)

    def items(self, name: str) -> Sequence[JSON]:
        """Returns a list; empty where it is not there."""
        value = self._fields.get(name)
        if value is None:
            return ()
        if not isinstance(value, list):
            raise self.wrong(name, "a list")
        return value

    def objects(self, name: str) -> "list[Body]":
        """Returns a list of objects; empty where it is not there."""
        found = []
        for place, value in enumerate(self.items(name)):
            if not isinstance(value, Mapping):
                raise self.wrong(name, "a list of objects")
            found.append(Body(value, f"{self._where}{name}[{place}]."))
        return found

    def inner(self, name: str) -> "Body":
        """Returns an object; one without fields where it is not there."""
        value = self._fields.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise self.wrong(name, "an object")
        return Body(value, f"{self._where}{name}.")

    def token_ids(self, name: str) -> list[int]:
        """Returns token ids. ApiError where there are none."""
        value = self._fields.get(name)
        if not isinstance(value, list) or not value:
            raise self.wrong(name, "a list of token ids, of one at least")
        if any(isinstance(each, bool) or not isinstance(each, int) or each < 0 for each in value):
            raise self.wrong(name, "a list of token ids, which are whole numbers")
        return [each for each in value if isinstance(each, int)]

    def refuse(self, name: str, why: str, *allowed: JSON) -> None:
        """Raises ApiError where a field is given and none of the values that change nothing."""
        value = self._fields.get(name)
        if value is not None and value not in allowed:
            raise ApiError(400, f"{self._where}{name} = {json.dumps(value)[:80]}: {why}.", param=f"{self._where}{name}")
