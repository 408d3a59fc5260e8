"""How an outcome that is no success is told: one table from `Outcome` to an error. Pure."""

from __future__ import annotations

from typing import assert_never

from stanchion.core import errors, outcome
from stanchion.core.errors import Bug, ServeError


class Draining(ServeError):
    """The server takes nothing new, since it is stopping."""

    status = 503
    retry = True
    code = "draining"


class Aborted(ServeError):
    """The server ended the request before its end."""

    status = 503
    retry = True
    code = "aborted"


def failure(ended: outcome.Outcome) -> ServeError:
    match ended:
        case outcome.Cancelled(by="monitor"):
            return errors.OutputSuspect("the output monitor stopped the answer")
        case outcome.Cancelled(by="drain"):
            return Draining("the server is stopping and could not finish this answer")
        case outcome.Cancelled():
            return Aborted(f"the request was cut off ({ended.by})")
        case outcome.Rejected():
            return errors.RequestRejected(ended.field, ended.message)
        case outcome.Overloaded():
            return errors.Overloaded(ended.message, ended.retry_after_s)
        case outcome.PeerLost():
            return errors.PeerLost(ended.message)
        case outcome.OutputSuspect():
            return errors.OutputSuspect(ended.evidence)
        case outcome.Completed():
            raise Bug("a completed answer told as a failure")
        case _:
            assert_never(ended)
