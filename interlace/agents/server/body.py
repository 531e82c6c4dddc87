"""A request's JSON body, its validation, and the errors of requests: each names the field and has an HTTP status."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import ErrorDetails, from_json

from interlace.core.errors import ContextFullError, EnginesBusyError, UserError, nearest
from interlace.core.types import JSON

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip

_LONGEST_MESSAGE = 2000
"""Most characters of a message: a message may quote a request, which may have LARGEST_BODY bytes."""
CONTEXT_FULL = "context_length_exceeded"
"""OpenAI's code of an error for a conversation that is longer than the model's context."""


class ApiError(UserError):
    """Error with an HTTP status. A UserError becomes one with status 400."""

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str = "", retry_after_s: float | None = None
    ) -> None:
        """param: name of the wrong field. retry_after_s: seconds after which the client may send the request again."""
        super().__init__(message if len(message) <= _LONGEST_MESSAGE else f"{message[:_LONGEST_MESSAGE]} ...")
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def kind(self) -> str:
        """Type of the error in the clients' terms."""
        return _TYPES.get(self.status, "api_error")

    @property
    def headers(self) -> Mapping[str, str]:
        if self.retry_after_s is not None:
            return {"Retry-After": f"{max(1.0, self.retry_after_s):.0f}", "x-should-retry": "true"}
        # OpenAI's clients retry conflicts, and this conflict is permanent.
        return {"x-should-retry": "false"} if self.status == 409 else {}


def as_api_error(error: Exception) -> ApiError:
    """Returns the error that a client gets for an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EnginesBusyError):
        return ApiError(503, str(error), retry_after_s=error.retry_after_s)
    if isinstance(error, ContextFullError):
        # Clients recognise this error by its code or by these words, and shorten or end their conversation.
        return ApiError(400, f"{error} This model's maximum context length is exceeded.", code=CONTEXT_FULL)
    return (
        ApiError(400, str(error)) if isinstance(error, UserError) else ApiError(500, f"{type(error).__name__}: {error}")
    )


def as_openai(error: ApiError) -> dict[str, JSON]:
    """Returns an error in OpenAI's format."""
    fields: dict[str, JSON] = {
        "message": str(error),
        "type": error.kind,
        "param": error.param or None,
        "code": error.code or None,
    }
    return {"error": fields}


class RequestModel(BaseModel):
    """Base of the request models. An unknown field with a value is refused by name, never ignored.

    A field whose value is null counts as left out, also in parts of a request: clients send null for the options that
    are not set.
    """

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return drop_nulls(fields)


MOST_FIELDS = 256
"""Most fields of an object of a request that have fixed names. pydantic keeps about 1 KB for each wrong field."""
_LONGEST_NAME = 200
"""Most characters of a field's path in an error message."""


def drop_nulls(value: Any) -> Any:
    """Returns an object without its fields that are null; any other value as it is. ValueError for too many fields."""
    if not isinstance(value, dict):
        return value
    if len(value) > MOST_FIELDS:
        raise ValueError(f"it has {len(value)} fields; at most {MOST_FIELDS} are read")
    return {name: field for name, field in value.items() if field is not None}


M = TypeVar("M", bound=BaseModel)
_WANTED = {
    **dict.fromkeys(("int_type", "int_from_float", "int_parsing"), "it must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "it must be a number"),
    **dict.fromkeys(("model_type", "dict_type", "mapping_type", "model_attributes_type"), "it must be an object"),
    "finite_number": "it must be a finite number",
    "bool_type": "it must be true or false",
    "string_type": "it must be text",
    "list_type": "it must be a list",
    "too_short": "it is empty",
    "string_too_short": "it is empty",
    "missing": "it is required",
}
"""Plain words for pydantic's messages, by the kind of mistake."""


class Body:
    """The fields of a request's body."""

    def __init__(self, fields: Mapping[str, JSON]) -> None:
        self._fields = fields

    @classmethod
    def parse(cls, content: bytes) -> "Body":
        """Parses a body. An empty body has no fields. Raises ApiError if it is not a JSON object in UTF-8."""
        try:
            fields = from_json(content or b"{}")
        except ValueError as error:
            raise ApiError(400, f"the body is not valid JSON: {error}.", code="invalid_json") from None
        if not isinstance(fields, dict):
            raise ApiError(400, f"the body is a JSON {type(fields).__name__}; it must be an object.")
        return cls(fields)

    def read(self, model: type[M]) -> M:
        """Validates the fields. Raises ApiError that names the first mistake."""
        try:
            return model.model_validate(self._fields)
        except ValidationError as error:
            raise _first_mistake(error, model) from None


def _first_mistake(error: ValidationError, model: type[BaseModel]) -> ApiError:
    detail = error.errors(include_url=False)[0]
    name = _format_field(detail["loc"])
    if detail["type"] == "extra_forbidden":
        options = model.model_fields if len(detail["loc"]) == 1 else ()
        hint = nearest(name, options) if options else ""
        return ApiError(400, f"the field {name!r} is not supported here: leave it out.{hint}", param=name)
    if detail["type"] == "missing":
        return ApiError(400, f"{name} is missing: it is required.", param=name)
    if not name:
        return ApiError(400, f"the body: {_format_reason(detail)}.")
    return ApiError(400, f"{name} = {_show_value(detail['input'])}: {_format_reason(detail)}.", param=name)


def _format_field(place: Sequence[str | int]) -> str:
    """Returns the path of a field, such as messages[0].content."""
    path = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place).removeprefix(".")
    return path if len(path) <= _LONGEST_NAME else f"{path[:_LONGEST_NAME]} ..."


def _show_value(value: object) -> str:
    """Returns a value for an error message, at most 80 characters. Large integers are described by their size."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, list | dict) and len(value) > 20:
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, str):
        value = value[:80]
    return json.dumps(value, default=str)[:80]


def _format_reason(detail: ErrorDetails) -> str:
    context = detail.get("ctx", {})
    if detail["type"] in ("greater_than_equal", "less_than_equal"):
        bound = f"at least {context['ge']}" if "ge" in context else f"at most {context['le']}"
        return f"it must be {bound}"
    if detail["type"] in ("too_long", "string_too_long"):
        unit = "characters" if detail["type"] == "string_too_long" else "entries"
        return f"it may have at most {context['max_length']} {unit}"
    return _WANTED.get(detail["type"]) or detail["msg"].removeprefix("Value error, ")
