"""Which tokens may come next under a grammar: llguidance, and what it is held to. No I/O.

The gateway compiles a grammar to know whether it can be served, the engine to follow it: by the
same vocabulary, under the same limits, so both find the same. A grammar's cost is bounded before
(`core.grammar`) and by fuel, which is counted in work done and not in time: what one worker can
compile all can.

Nothing is forced: wherever a grammar leaves only one text, any tokens that spell it may be drawn,
so the distribution is the model's own, restricted. A token that ends an answer is allowed where
the grammar may end, and special tokens only where the grammar names them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from stanchion.core.grammar import TooLarge, check

MATCHERS_KEPT = 64  # compiled grammars: agents send the same one with every turn
LEXER_FUEL = 200_000  # for the first states of a lexer: some 4 ms
LEXER_STATES_MAX = 50_000  # about 1 to 2 kB each
GRAMMAR_SYMBOLS_MAX = 200_000
ERROR_CHARACTERS_MAX = 400


class GrammarFault(Exception):
    """A grammar that cannot be compiled or followed. It is its own request's trouble alone."""


class _Words:
    """A vocabulary as llguidance wants it."""

    def __init__(self, pieces: Sequence[bytes], special: Sequence[int], eos_id: int) -> None:
        self.tokens = pieces
        self.special_token_ids = special
        self.eos_token_id = eos_id
        self.bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        """Only what is forced would be tokenised, and nothing is."""
        return list(text)


class Matcher:
    """How far one answer has come in its grammar."""

    def __init__(self, machine: LLMatcher, ends: frozenset[int]) -> None:
        self._machine = machine
        self._ends = ends

    def allowed(self) -> bytes:
        """A bit for each token of the vocabulary, lowest bit first. Raise GrammarFault."""
        bits = self._machine.compute_bitmask()
        self._sound()
        if bits.count(0) == len(bits):
            raise GrammarFault("nothing can follow what was said")
        return bits

    def say(self, tokens: Sequence[int]) -> bool:
        """Take tokens of the answer; False at one that ends it, which is not taken itself: the
        library, rolled back over an end token, may be left where it was not (1.7.6).
        Raise GrammarFault for a token that the grammar does not have there."""
        for token in tokens:
            if token in self._ends:
                return False
            if not self._machine.consume_token(token):
                self._sound()
        return True

    def back(self, count: int) -> None:
        """Forget the last so many tokens that were taken."""
        if count and not self._machine.rollback(count):
            self._sound()

    def _sound(self) -> None:
        if self._machine.is_error():
            raise GrammarFault(_said(self._machine.get_error()))


class Grammars:
    """Compiles grammars for one vocabulary."""

    def __init__(
        self, pieces: Sequence[bytes], special: frozenset[int], eos_ids: Sequence[int], size: int
    ) -> None:
        """`size`: ids of the model, of which the last may have no piece."""
        self._ends = frozenset(eos_ids)
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL,
            max_lexer_states=LEXER_STATES_MAX,
            max_grammar_size=GRAMMAR_SYMBOLS_MAX,
            verbose_errors=False,
        )
        self._tokenizer: LLTokenizer | None = None
        if eos_ids:
            tokens = [*pieces[:size], *(b"" for _ in range(size - len(pieces)))]
            words = _Words(tokens, sorted(one for one in special if one < size), eos_ids[0])
            self._tokenizer = LLTokenizer(TokenizerWrapper(words), eos_token=list(eos_ids))

    def matcher(self, text: str) -> Matcher:
        """At the start of an answer. Raise GrammarFault, for what is beyond a bound too."""
        machine = self._kept.pop(text, None) or self._compiled(text)
        self._kept[text] = machine
        if len(self._kept) > MATCHERS_KEPT:
            self._kept.popitem(last=False)
        return Matcher(machine.deep_copy(), self._ends)

    def check(self, text: str) -> None:
        """Raise GrammarFault for what cannot be compiled. Nothing is kept: any thread may ask."""
        self._compiled(text)

    def _compiled(self, text: str) -> LLMatcher:
        if self._tokenizer is None:
            raise GrammarFault("this model has no end token, so nothing could end where it should")
        try:
            check(text)
        except TooLarge as error:
            raise GrammarFault(str(error)) from None
        machine = LLMatcher(self._tokenizer, text, log_level=0, limits=self._limits)
        machine.compute_bitmask()  # what cannot even begin is found here
        if machine.is_error():
            raise GrammarFault(_said(machine.get_error()))
        return machine


def _said(error: str) -> str:
    """The library's words without what it adds of its own state."""
    if error.startswith("NoExtension"):
        return "no text follows it to an end"
    said = error.partition("\n<")[0].strip()
    return said[:ERROR_CHARACTERS_MAX]
