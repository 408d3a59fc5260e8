"""What was tried for one answer, as it happens: attempts, verdicts, accepted drafts. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from stanchion.core.messages import Spec
from stanchion.core.outcome import Outcome
from stanchion.core.recording import Attempt
from stanchion.gateway.ledger import Mail
from stanchion.gateway.router import Life


class Attempts:
    def __init__(self) -> None:
        self._over: list[Attempt] = []
        self._accepts: Counter[int] = Counter()
        self._begin()

    def _begin(self) -> None:
        self._workers = ""
        self._tokens = 0
        self._outcome = ""
        self._verdict: str | None = None
        self._suspicion: str | None = None
        self._spec = Spec(0, 0, 0, 0)

    def came(self, mail: Mail, lives: Sequence[Life]) -> None:
        """Of the attempt that is running."""
        self._workers = "+".join(name for name, _ in lives) or self._workers
        self._tokens += len(mail.tokens)
        for _, spec in mail.readings:
            steps = spec.verify_steps - self._spec.verify_steps
            if steps == 1:  # several at once do not say which accepted how many
                self._accepts[spec.accepted - self._spec.accepted] += 1
            self._spec = spec
        if mail.ended is not None:
            self.ended(mail.ended)

    def suspected(self, kind: str) -> None:
        self._suspicion = self._suspicion or kind

    def judged(self, finding: str) -> None:
        self._verdict = finding

    def ended(self, outcome: Outcome) -> None:
        self._outcome = self._outcome or str(outcome.__struct_config__.tag)

    def again(self, lives: Sequence[Life]) -> None:
        """The running attempt is dropped; another begins."""
        self._workers = "+".join(name for name, _ in lives) or self._workers
        self._outcome = self._outcome or "cancelled"
        self._over.append(self._running())
        self._begin()

    def _running(self) -> Attempt:
        verdict = self._verdict or self._suspicion
        return Attempt(
            worker=self._workers, outcome=self._outcome, tokens=self._tokens, verdict=verdict
        )

    def all(self) -> tuple[Attempt, ...]:
        return (*self._over, self._running())

    def accepts(self) -> tuple[int, ...]:
        """[i]: verify steps that accepted i drafts, as far as they were told one by one."""
        if not self._accepts:
            return ()
        return tuple(self._accepts[count] for count in range(max(self._accepts) + 1))
