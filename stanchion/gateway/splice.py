"""What carries over from one attempt at an answer to the next, so that they make one text. Pure.

A resumed attempt has the clean tokens as part of its prompt, and is told how many of them are the
answer's own: for its penalties and its grammar they are said. Positions count over prompt and
output, and every uniform is a function of (seed, stream, position), so what is drawn at a place
does not depend on how many attempts there were: greedy text is the solo run's to the token. A
sampled text has its right distribution, but may be another text than the solo run's, since verify
windows begin elsewhere. Stop strings, characters and parsers need nothing: they read the released
tokens alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from hashlib import blake2b

from msgspec.structs import replace

from stanchion.core.messages import Start
from stanchion.core.outcome import Completed
from stanchion.core.request import Sampling
from stanchion.gateway.choice import ChoiceFold, Style


def seeded(start: Start) -> Start:
    """Draws are a function of seed and position, and a seed is else one of the attempt's name:
    with one of the answer's own, another attempt draws the same numbers at the same places."""
    if start.sampling.greedy or start.sampling.seed is not None:
        return start
    digest = blake2b(start.request.encode(), digest_size=7).digest()
    sampling = replace(start.sampling, seed=int.from_bytes(digest, "little"))
    return replace(start, sampling=sampling)


def resumable(start: Start) -> bool:
    """Can it go on behind tokens that are part of its prompt then? Scores of the prompt would have
    them."""
    return start.sampling.prompt_logprobs is None


def resumed(start: Start, kept: Sequence[int], request: str, salt: str) -> Start:
    """The rest of an answer, from cold KV."""
    one = start.sampling
    sampling = replace(
        one,
        max_tokens=one.max_tokens - len(kept),
        min_tokens=max(0, one.min_tokens - len(kept)),
    )
    return replace(
        start,
        request=request,
        tokens=[*start.tokens, *kept],
        said=start.said + len(kept),
        sampling=sampling,
        salt=salt,
    )


def finished(sampling: Sampling, style: Style, tokens: Sequence[int]) -> Completed | None:
    """How an answer of these tokens has ended, if it has."""
    if tokens and tokens[-1] in style.end_ids and len(tokens) > sampling.min_tokens:
        return Completed("stop")
    return Completed("length") if len(tokens) >= sampling.max_tokens else None


def stopper(style: Style) -> Callable[[int], bool]:
    fold = ChoiceFold(style)

    def stopped(token: int) -> bool:
        fold.push([token], [0.0], ())
        return fold.end is not None

    return stopped
