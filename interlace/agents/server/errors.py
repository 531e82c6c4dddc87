"""Errors of requests, with their HTTP status."""

from collections.abc import Mapping

from interlace.core.errors import ContextFullError, EnginesBusyError, UserError
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
