"""The errors a caller can tell apart. Each knows its HTTP status and whether a retry may help.

* ServeError
  x RequestRejected      the request can never succeed here       400, final
  x Unauthorized         no key, or not this one                  401, final
  x NotFound             no such route or model                   404, final
  x TooLarge             the body is over its bound               413, final
  x Overloaded           it could succeed later or elsewhere      429, retry
  x QuotaExceeded        the tenant has used its share           429, retry
  x PeerLost             a worker died while holding it           503, retry
  x OutputSuspect        the engine or the monitor stopped it     502, retry
  x ConfigError          the settings make no sense               at start
  x WeightsError         a checkpoint that we cannot run          at start
  x TraceError           a recording or trace that is not one     at reading

A broken promise between our own parts is not in this list: it is a Bug, and it ends the process.
"""

from __future__ import annotations


class ServeError(Exception):
    status = 500
    retry = False
    code = "internal_error"


class RequestRejected(ServeError):
    """The request breaks a bound. `field` names what to change."""

    status = 400
    code = "invalid_request_error"

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field


class Unauthorized(ServeError):
    status = 401
    code = "invalid_api_key"


class NotFound(ServeError):
    status = 404
    code = "not_found"


class TooLarge(ServeError):
    status = 413
    code = "request_too_large"


class Overloaded(ServeError):
    status = 429
    retry = True
    code = "overloaded"

    def __init__(self, message: str, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class QuotaExceeded(ServeError):
    """`quota` names the bound; it lets more through after so many seconds."""

    status = 429
    retry = True
    code = "rate_limit_exceeded"

    def __init__(self, quota: str, message: str, retry_after_s: float) -> None:
        super().__init__(f"{quota}: {message}")
        self.quota = quota
        self.retry_after_s = retry_after_s


class PeerLost(ServeError):
    status = 503
    retry = True
    code = "worker_lost"


class OutputSuspect(ServeError):
    status = 502
    retry = True
    code = "output_suspect"


class ConfigError(ServeError):
    """The message names the setting and what it wants."""


class WeightsError(ServeError):
    """The message names the file or the tensors that do not fit."""


class TraceError(ServeError):
    """The message has file:line, the field, and what was expected there."""

    status = 400
    code = "invalid_trace"

    def __init__(self, path: object, line: int | None, message: str) -> None:
        place = f"{path}:{line}" if line else str(path)
        super().__init__(f"{place}: {message}")


class Bug(Exception):
    """A part of ours broke its contract. Nothing catches this below `cli`."""
