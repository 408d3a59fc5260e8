"""What an export gives away, in words and in figures: printed, and written beside it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from stanchion.lab.anonymise.privacy import Anonymity, Dictionary

PRIVACY = "privacy.json"
LEVELS = {
    "hashes": "no content: hashes and pseudonyms under a key that is gone",
    "surrogate": "other words in the places of all words, under a key that is gone",
    "secrets": "CONTENT IS IN IT: only what the detectors found was masked",
}


@dataclass(frozen=True)
class Kept:
    """Structure: what differs from the original, by name; page hits before and after. `masked`:
    secrets by kind. `without_words`: records whose words could not be replaced exactly, so that
    they were exported as hashes, by reason. `shared_words`: short texts that share a surrogate."""

    differences: tuple[str, ...]
    hits_before: int
    hits_after: int
    masked: dict[str, int] = field(default_factory=dict)
    without_words: dict[str, int] = field(default_factory=dict)
    shared_words: int = 0
    tokens: int = 0

    @property
    def exactly(self) -> bool:
        return not self.differences and self.hits_before == self.hits_after


@dataclass(frozen=True)
class Canaries:
    """`records` that they were planted in, and how many of these kept words to look into."""

    planted: int
    leaked: int
    records: int = 0
    with_words: int = 0

    @property
    def recall(self) -> float:
        return 1 - self.leaked / self.planted if self.planted else 1.0


@dataclass(frozen=True)
class Attacks:
    """`linked`: names and hashes that another export of the same would have too."""

    dictionary: Dictionary
    linked: int
    exact: Anonymity
    coarse: Anonymity


@dataclass(frozen=True)
class Report:
    level: str
    requests: int
    time_step_s: float
    kept: Kept
    canaries: Canaries
    attacks: Attacks

    @property
    def clean(self) -> bool:
        """No attack came through. At `secrets` canaries are a measure, and no promise."""
        leaked = self.canaries.leaked if self.level != "secrets" else 0
        return not (leaked or self.attacks.dictionary.hits or self.attacks.linked)

    def text(self) -> str:
        return "\n".join([*self._structure(), *self._attacks()])

    def _structure(self) -> list[str]:
        kept = self.kept
        said = [f"{self.requests} requests; {self.level}: {LEVELS[self.level]}"]
        if kept.exactly:
            said.append(f"structure       kept exactly; page hits {kept.hits_after}")
        else:
            said.append(f"structure       DIFFERS: {', '.join(kept.differences) or 'page hits'}")
            said.append(
                f"                page hits {kept.hits_before} before, {kept.hits_after} after"
            )
        if self.time_step_s:
            said.append(f"times           rounded down to {self.time_step_s:g} s, as asked")
        for why, count in kept.without_words.items():
            said.append(f"without words   {count}: {why}")
        if kept.shared_words:
            said.append(f"short texts     {kept.shared_words} share their surrogate with another")
        for kind, count in sorted(kept.masked.items()):
            said.append(f"masked          {count} x {kind}")
        return said

    def _attacks(self) -> list[str]:
        canaries, attacks = self.canaries, self.attacks
        tried = attacks.dictionary
        caught = f"{canaries.leaked} came out (recall {canaries.recall:.1%})"
        by = f", by {', '.join(tried.schemes)}" if tried.schemes else ""
        said = [
            f"canaries        {canaries.planted} planted, {caught}",
            f"dictionary      {tried.guesses} guesses, {tried.hits} hits{by}",
            f"linkage         {attacks.linked} names or hashes in common with another export",
        ]
        if canaries.records:
            said[0] += f"; {canaries.with_words} of {canaries.records} records kept words"
        for one in (attacks.exact, attacks.coarse):
            step = "as they are" if one.token_step == 1 else f"in steps of {one.token_step}"
            said.append(
                f"k-anonymity     prompt lengths {step}, arrivals by {one.second_step:g} s: "
                f"{one.alone} of {one.requests} are alone, smallest group {one.smallest}"
            )
        said.append("                lengths and times are kept: who knows them can find a request")
        return said
