"""How all is, for `/admin/state` and whoever draws it: numbers and names, never content. Pure."""

from __future__ import annotations

from stanchion.core.acceptance import accept_length, accept_rate
from stanchion.core.messages import Spec
from stanchion.gateway.fleet import Fleet
from stanchion.gateway.members import View
from stanchion.gateway.replies import Json


def workers(fleet: Fleet) -> list[Json]:
    return [_worker(view, fleet) for view in fleet.views()]


def _worker(view: View, fleet: Fleet) -> Json:
    said: Json = {"name": view.name, "role": view.role, "up": False, "lost": view.lost}
    member = view.member
    if member is None:
        return said
    ledger, told = member.link.ledger, fleet.told(member)
    said |= {
        "up": ledger.hello is not None,
        "requests": fleet.permits(member),
        "breaker": told.breaker,
        "pace": told.pace,
        "out": told.out,
        "suspicious": told.suspicious,
    }
    if (progress := ledger.progress) is not None:
        said |= {
            "running": progress.running,
            "waiting": progress.waiting,
            "pages": progress.pages,
            "pages_free": progress.pages_free,
            "pages_cached": progress.pages_cached,
            "pages_quarantined": progress.pages_quarantined,
            "pages_dropped": progress.pages_dropped,
            "host_pages": progress.tiers.host_pages if progress.tiers else 0,
            "host_pages_free": progress.tiers.host_free if progress.tiers else 0,
            "draining": progress.draining,
        }
    return said


def totals(fleet: Fleet) -> Json:
    told, attempts = fleet.integrity, fleet.attempts
    return {
        "integrity": told.mode,
        "verdicts": dict(told.verdicts),
        "anomalies": {f"{kind} {action}": one for (kind, action), one in told.anomalies.items()},
        "quality_retries": dict(told.outcomes),
        "draft_faults": told.draft_faults_found,
        "routed": dict(attempts.routed),
        "retries": dict(attempts.retries),
        "retries_over_budget": attempts.over_budget,
        "faults": dict(fleet.rotation.owners),
    }


def acceptance(spec: Spec | None) -> Json:
    """Running, of one answer; null where nothing was measured."""
    length, rate = (None, None) if spec is None else (accept_length(spec), accept_rate(spec))
    return {"accept_length": length, "accept_rate": rate}
