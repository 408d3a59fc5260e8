"""A grammar along a verify window: the matcher goes with the drafts, and comes back.

Drafts and the target's rows are restricted by the same masks, each made once: a draft is drawn from
what the grammar has there, and judged against the target's distribution over the same tokens. So
speculation is as lossless as without a grammar, of the target restricted to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stanchion.core.matching import GrammarFault, Grammars, Matcher
from stanchion.core.messages import Start
from stanchion.core.outcome import Outcome, Rejected
from stanchion.engine.request import Request


@dataclass
class Path:
    """`allowed[n]` is what may follow n drafts; None after one that ends the answer, for whose
    sequel nobody asks, and where the grammar failed, which `fault` says."""

    matcher: Matcher
    allowed: list[bytes | None] = field(default_factory=list)
    fault: str | None = None
    _taken: int = 0
    _over: bool = False

    def look(self) -> bytes | None:
        """What may come here."""
        bits = None
        if not self._over and self.fault is None:
            try:
                bits = self.matcher.allowed()
            except GrammarFault as fault:
                self.fault = str(fault)
        self.allowed.append(bits)
        return bits

    def step(self, draft: int) -> None:
        if self._over or self.fault is not None:
            return
        try:
            self._over = not self.matcher.say([draft])
            self._taken += not self._over
        except GrammarFault as fault:
            self.fault = str(fault)

    def back(self) -> None:
        """Nothing of this was said."""
        if self.fault is None:
            try:
                self.matcher.back(self._taken)
            except GrammarFault as fault:
                self.fault = str(fault)
        self._taken = 0


def begun(start: Start, grammars: Grammars | None) -> Matcher | None:
    """The matcher of an answer, led to where earlier attempts at it got. Raise GrammarFault."""
    if start.grammar is None:
        return None
    if grammars is None:
        raise GrammarFault("this worker knows no vocabulary to follow one with")
    matcher = grammars.matcher(start.grammar)
    if start.said and not matcher.say(start.tokens[-start.said :]):
        raise GrammarFault("what was said of the answer has ended it")
    return matcher


def followed(request: Request, tokens: list[int]) -> Outcome | None:
    """Take what was said, which did not end the answer, into its grammar; an outcome if that
    fails."""
    if request.matcher is None:
        return None
    try:
        request.matcher.say(tokens)
    except GrammarFault as fault:
        return Rejected("grammar", str(fault))
    return None
