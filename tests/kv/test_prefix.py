from collections import OrderedDict

import numpy as np
import pytest

from stanchion.core.errors import Bug
from stanchion.core.identity import CacheIdentity, chain
from stanchion.core.messages import differences
from stanchion.kv.pages import PagePool, Pin
from stanchion.kv.prefix import PrefixTree, Tokens
from stanchion.kv.ready import Ready
from stanchion.kv.schema import Buffer, Schema
from stanchion.sim.choices import seeded

ROOT = CacheIdentity("tenant", "", "model", "1", "schema").digest()
PAGE = 4


def tokens(count: int, first: int = 0) -> Tokens:
    return np.arange(first, first + count, dtype=np.int32)


def published(pool: PagePool, tree: PrefixTree, said: Tokens, root: bytes = ROOT) -> list[int]:
    """Put the whole pages of `said` into the tree, as a request that then leaves."""
    keys = tree.keys(root, said, [])
    pin = pool.take(len(keys), "request")
    tree.publish(b"root", keys, said, pin.pages, 0)
    pages: list[int] = pin.pages.tolist()
    pin.drop()
    return pages


def test_a_hit_is_the_longest_run_of_whole_pages() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, PAGE)
    pages = published(pool, tree, tokens(14))
    assert len(pages) == 3  # the tail page is never shared
    other = np.concatenate([tokens(9), tokens(5, 90)]).astype(np.int32)
    assert tree.match(tree.keys(ROOT, other, []), other).tolist() == pages[:2]


def test_another_identity_never_hits() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, PAGE)
    published(pool, tree, tokens(8))
    for other in (
        CacheIdentity("other", "", "model", "1", "schema"),
        CacheIdentity("tenant", "salt", "model", "1", "schema"),
        CacheIdentity("tenant", "", "model", "2", "schema"),
        CacheIdentity("tenant", "", "model", "1", "other"),
    ):
        keys = tree.keys(other.digest(), tokens(8), [])
        assert len(tree.match(keys, tokens(8))) == 0


def test_identities_are_told_apart_field_by_field() -> None:
    fields = ("a", "b", "ab", "", "a\x00b")
    digests = {
        CacheIdentity(tenant, salt, model, revision, schema).digest()
        for tenant in fields
        for salt in fields
        for model in fields
        for revision in fields
        for schema in fields
    }
    assert len(digests) == len(fields) ** 5


@pytest.mark.parametrize("pair", [(65, 321), (65, 65_601), (0, 256)])
def test_token_ids_count_in_full(pair: tuple[int, int]) -> None:
    pages = [np.full(PAGE, token, np.int32).tobytes() for token in pair]
    assert chain(ROOT, pages[0]) != chain(ROOT, pages[1])


def test_a_digest_collision_is_a_miss() -> None:
    """With a digest of one byte, keys collide at once; the stored tokens must refuse the hit."""
    pool = PagePool(600)
    tree = PrefixTree(pool, PAGE, link=lambda parent, page: chain(parent, page)[:1])
    mine = tokens(PAGE)
    published(pool, tree, mine)
    key = tree.keys(ROOT, mine, [])[0]
    collided = 0
    for first in range(1, 3000):
        other = tokens(PAGE, first * 7)
        keys = tree.keys(ROOT, other, [])
        if keys[0] == key:
            collided += 1
            assert len(tree.match(keys, other)) == 0
    assert collided > 0


def test_what_a_request_holds_is_not_evicted() -> None:
    pool = PagePool(9)
    tree = PrefixTree(pool, PAGE)
    pages = published(pool, tree, tokens(16))
    holder = pool.regrip(np.array(pages[:2], np.int32), "request")
    assert tree.evictable == 2
    assert tree.evict(9) == 2
    assert tree.match(tree.keys(ROOT, tokens(16), []), tokens(16)).tolist() == pages[:2]
    holder.drop()
    assert tree.flush() == 2
    assert pool.available == 8 and pool.audit() == []


def test_who_computed_the_same_holds_the_trees_pages() -> None:
    """Two requests compute one prefix at once; the second goes on below the first's pages."""
    pool = PagePool(9)
    tree = PrefixTree(pool, PAGE)
    said = tokens(8)
    keys = tree.keys(ROOT, said, [])
    first, second = pool.take(2, "first"), pool.take(2, "second")
    assert len(tree.publish(b"root", keys[:1], said, first.pages, 0)) == 0
    known = tree.publish(b"root", keys[:1], said, second.pages, 0)
    assert known.tolist() == first.pages[:1].tolist()
    held = pool.regrip(known, "second")
    first.drop()
    assert len(tree.publish(b"root", keys, said, second.pages, 1)) == 0
    assert tree.evictable == 0 and tree.evict(9) == 0
    second.drop()
    held.drop()
    assert tree.evictable == 2 and tree.evict(9) == 2
    assert pool.available == 8 and pool.audit() == []


def by_hand(pool: PagePool) -> dict[int, list[str]]:
    """As `pool.holders` of every page, in one walk."""
    found: dict[int, list[str]] = {}
    for grip in pool._grips:
        for page in grip.pages.tolist():
            found.setdefault(page, []).extend(pin.holder for pin in grip.pins)
    return found


def test_what_can_be_evicted_is_counted_exactly() -> None:
    """Against a count by hand, through random use."""
    choices = seeded(3)
    pool = PagePool(65)
    tree = PrefixTree(pool, PAGE)
    pins: list[Pin] = []
    for _ in range(600):
        said = tokens(4 * (1 + choices.pick(5)), 100 * choices.pick(4))
        keys = tree.keys(ROOT, said, [])
        hit = tree.match(keys, said)
        if len(keys) - len(hit) <= pool.available:
            shared = pool.regrip(hit, "r")
            own = pool.take(len(keys) - len(hit), "r")
            pages = np.concatenate([shared.pages, own.pages])
            tree.publish(b"root", keys, said, pages, len(hit))
            pins += [shared, own]
        while pins and choices.pick(2):
            pins.pop(choices.pick(len(pins))).drop()
        alone = sum(holders == ["prefix"] for holders in by_hand(pool).values())
        assert tree.evictable == pool.kept_alone == alone
        if choices.pick(4) == 0 and not pins:
            assert tree.evict(3) == min(3, alone)
    assert pool.audit() == []


def test_least_recently_used_leaves_first() -> None:
    pool = PagePool(9)
    tree = PrefixTree(pool, PAGE)
    old, new = tokens(8), tokens(8, 100)
    published(pool, tree, old)
    published(pool, tree, new)
    tree.match(tree.keys(ROOT, old, []), old)  # now `new` is the one that rested longer
    tree.evict(2)
    assert len(tree.match(tree.keys(ROOT, old, []), old)) == 2
    assert len(tree.match(tree.keys(ROOT, new, []), new)) == 0


def test_readiness_is_the_minimum_over_layers() -> None:
    ready = Ready(pages=5, target_layers=2, layers=3, page_tokens=PAGE)
    pages = np.array([1, 2], np.int32)
    for layer in (0, 1):
        ready.raise_to(layer, pages, np.array([4, 4], np.int32))
    assert ready.complete(pages).tolist() == [False, False]
    ready.raise_to(2, pages, np.array([4, 3], np.int32))
    assert ready.complete(pages).tolist() == [True, False]
    ready.lower_to(pages[:1], np.array([2], np.int32), np.array([3], np.int32))
    assert ready.rows(2, 1) == 3
    assert not ready.complete(pages).any()
    assert ready.rows(0, 1) == 2


def test_a_proof_wants_every_page_every_layer_and_its_generation() -> None:
    ready = Ready(pages=5, target_layers=2, layers=3, page_tokens=PAGE)
    pages = np.array([3, 1], np.int32)
    now = np.array([0, 7, 0, 9, 0], np.int64)
    mine = np.array([9, 7], np.int64)
    for layer in (0, 1):
        ready.raise_to(layer, pages, np.array([4, 2], np.int32))
    ready.raise_to(2, pages, np.array([4, 1], np.int32))
    proof = ready.prove("r", pages, 6, 5, mine, now)
    assert (proof.request, proof.tokens) == ("r", 6)
    with pytest.raises(Bug, match="page 1, which is not ready"):
        ready.prove("r", pages, 7, 5, mine, now)  # the target layers end at 6
    with pytest.raises(Bug, match="page 1, which is not ready"):
        ready.prove("r", pages, 6, 6, mine, now)  # the draft layer ends at 5
    with pytest.raises(Bug, match="another generation"):
        ready.prove("r", pages, 6, 5, np.array([9, 6], np.int64), now)


def schema(index_dtype: str = "float32", draft: bool = True) -> Schema:
    buffers = tuple(
        Buffer(name, layer, door, dtype, 8)  # type: ignore[arg-type]
        for layer in range(2 + draft)
        for name, door, dtype in (
            ("index_key", "index", index_dtype),
            ("latent_rope", "attend", "float32"),
        )
    )
    return Schema("m", 16, 2 + draft, draft, buffers)


def test_unequal_schemas_name_what_differs() -> None:
    assert schema().digest() == schema().digest()
    assert schema().digest() != schema("bfloat16").digest()
    said = differences(schema().described(), schema("bfloat16", draft=False).described())
    assert "layers: 3 here, 2 there" in said and "draft_layer: true here, false there" in said
    theirs = "8 x bfloat16 behind the index door"
    ours = "8 x float32 behind the index door"
    assert f"buffer index_key of layer 0: {ours} here, {theirs} there" in said
    lacking = "buffer latent_rope of layer 2: 8 x float32 behind the attend door here, absent there"
    assert lacking in said
    assert differences(schema().described(), schema().described()) == []


def test_a_schema_knows_its_bytes_and_its_doors() -> None:
    one = schema()
    assert one.row_bytes == 3 * 2 * 8 * 4 and one.page_bytes == 16 * one.row_bytes
    assert [buffer.name for buffer in one.behind(1, "attend")] == ["latent_rope"]


# ---- who leaves -----------------------------------------------------------------------------


def found(tree: PrefixTree, said: Tokens) -> int:
    return len(tree.match(tree.keys(ROOT, said, []), said))


def test_a_page_that_was_found_outlives_newer_ones_that_were_not() -> None:
    """What an agent's next turn begins with stays; the ends of answers that nobody asks for go."""
    pool = PagePool(20)
    tree = PrefixTree(pool, PAGE)
    published(pool, tree, tokens(4))
    assert found(tree, tokens(4))
    published(pool, tree, tokens(4, 100))
    assert tree.evict(1) == 1
    assert found(tree, tokens(4)) and not found(tree, tokens(4, 100))


def test_by_last_use_alone_the_older_one_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stanchion.kv.prefix.FOUND_LASTS", 1)
    pool = PagePool(20)
    tree = PrefixTree(pool, PAGE)
    published(pool, tree, tokens(4))
    assert found(tree, tokens(4))
    published(pool, tree, tokens(4, 100))
    tree.evict(1)
    assert not found(tree, tokens(4))


def test_a_page_that_was_found_once_does_not_stay_for_ever() -> None:
    pool = PagePool(20)
    tree = PrefixTree(pool, PAGE)
    published(pool, tree, tokens(4))
    assert found(tree, tokens(4))
    for turn in range(1, 40):
        published(pool, tree, tokens(4, 100 * turn))
        tree.evict(1)
    assert not found(tree, tokens(4))


def _computed_again(pool: PagePool, tree: PrefixTree) -> tuple[Tokens, Tokens]:
    """A prefix that left and was computed again, and one that only its maker had, newer."""
    again, once = tokens(12), tokens(8, 50)
    published(pool, tree, again)
    assert tree.evict(3) == 3
    published(pool, tree, again)
    published(pool, tree, once)
    return again, once


def test_a_page_that_was_computed_again_counts_as_found() -> None:
    pool = PagePool(30)
    tree = PrefixTree(pool, PAGE)
    again, once = _computed_again(pool, tree)
    tree.evict(2)
    assert len(tree.match(tree.keys(ROOT, again, []), again)) == 3
    assert len(tree.match(tree.keys(ROOT, once, []), once)) == 0


def test_without_a_memory_of_what_left_its_end_leaves_first_again() -> None:
    pool = PagePool(30)
    tree = PrefixTree(pool, PAGE)
    tree._gone = _Forgetful()
    again, once = _computed_again(pool, tree)
    tree.evict(2)
    assert len(tree.match(tree.keys(ROOT, again, []), again)) == 1
    assert len(tree.match(tree.keys(ROOT, once, []), once)) == 2


class _Forgetful(OrderedDict[bytes, None]):
    """The wrong variant."""

    def __setitem__(self, key: bytes, value: None) -> None:
        pass


def test_of_what_left_a_pools_worth_of_keys_is_kept() -> None:
    pool = PagePool(12)
    tree = PrefixTree(pool, PAGE)
    for first in range(0, 400, 40):
        published(pool, tree, tokens(32, first))
        tree.evict(8)
    assert len(tree._gone) == 12
    tree.flush()
    assert not tree._gone
