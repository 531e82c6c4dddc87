"""Errors that a client is answered with."""

from collections.abc import Mapping

from interlace.core.errors import EnginesBusyError, UserError
from interlace.core.types import JSON

_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    409: "conflict_error", 413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


class ApiError(UserError):
    """An answer with an HTTP status that tells of a mistake. What a UserError says is one too, of status 400."""

    def __init__(
        self, status: int, message: str, *, code: str = "", param: str = "", retry_after_s: float | None = None
    ) -> None:
        """param: name of the field that is wrong. retry_after_s: when it may be asked again."""
        super().__init__(message)
        self.status, self.code, self.param, self.retry_after_s = status, code, param, retry_after_s

    @property
    def kind(self) -> str:
        """Returns the type of the error, as clients know it."""
        return _TYPES.get(self.status, "api_error")

    @property
    def headers(self) -> Mapping[str, str]:
        """Returns the headers of the answer."""
        if self.retry_after_s is not None:
            return {"Retry-After": f"{max(1.0, self.retry_after_s):.0f}", "x-should-retry": "true"}
        # OpenAI's clients would try a conflict again, and this one will not pass.
        return {"x-should-retry": "false"} if self.status == 409 else {}


def as_api_error(error: Exception) -> ApiError:
    """Returns what a client is answered with where an exception was raised."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, EnginesBusyError):
        return ApiError(503, str(error), retry_after_s=error.retry_after_s)
    return (
        ApiError(400, str(error)) if isinstance(error, UserError) else ApiError(500, f"{type(error).__name__}: {error}")
    )


def as_openai(error: ApiError) -> dict[str, JSON]:
    """Writes an error in OpenAI's form."""
    fields: dict[str, JSON] = {
        "message": str(error),
        "type": error.kind,
        "param": error.param or None,
        "code": error.code or None,
    }
    return {"error": fields}
