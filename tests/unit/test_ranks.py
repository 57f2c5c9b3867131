from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from delayq.ranks import BUCKETS, Role, Roles, _mix, ranks, score

KINDS = frozenset({"mail", "order"})
INCARNATIONS = st.sets(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8)


def views(nodes: dict[int, frozenset[str]], kind: str = "mail") -> dict[int, Roles]:
    return {me: ranks(nodes, [kind], me) for me in nodes}


def holders(roles: dict[int, Roles], role: Role, bucket: int, kind: str = "mail") -> list[int]:
    return [me for me, mine in roles.items() if mine.role(kind, bucket) is role]


@given(INCARNATIONS)
def test_every_bucket_has_one_owner_and_one_other_understudy(incarnations: set[int]) -> None:
    roles = views(dict.fromkeys(incarnations, KINDS))
    for bucket in range(BUCKETS):
        owners = holders(roles, Role.OWNER, bucket)
        understudies = holders(roles, Role.UNDERSTUDY, bucket)
        assert len(owners) == 1
        assert len(understudies) == (1 if len(incarnations) > 1 else 0)


@given(INCARNATIONS, st.data())
def test_a_node_that_leaves_hands_each_bucket_to_its_understudy_and_nothing_else_moves(
    incarnations: set[int], data: st.DataObject
) -> None:
    leaver = data.draw(st.sampled_from(sorted(incarnations)))
    before = views(dict.fromkeys(incarnations, KINDS))
    after = views(dict.fromkeys(incarnations - {leaver}, KINDS))
    for bucket in range(BUCKETS):
        owner = holders(before, Role.OWNER, bucket)
        heir = holders(before, Role.UNDERSTUDY, bucket) if owner == [leaver] else owner
        assert holders(after, Role.OWNER, bucket) == heir


@given(INCARNATIONS, st.integers(-(2**63), 2**63 - 1))
def test_a_node_that_joins_takes_buckets_for_itself_and_moves_none_between_others(
    incarnations: set[int], newcomer: int
) -> None:
    before = views(dict.fromkeys(incarnations - {newcomer}, KINDS))
    after = views(dict.fromkeys(incarnations | {newcomer}, KINDS))
    for bucket in range(BUCKETS):
        owner = holders(after, Role.OWNER, bucket)
        assert owner in ([newcomer], holders(before, Role.OWNER, bucket))


def test_buckets_are_shared_out_evenly() -> None:
    # Neighbouring numbers: the mixing must not depend on random incarnations.
    nodes = dict.fromkeys(range(1, 9), KINDS)
    owned = Counter({me: len(roles.owned) for me, roles in views(nodes).items()})
    assert owned.total() == BUCKETS
    assert min(owned.values()) >= 16
    assert max(owned.values()) <= 48


def test_what_a_dead_node_leaves_behind_is_spread_over_all_others() -> None:
    nodes = dict.fromkeys(range(100, 105), KINDS)
    roles = views(nodes)
    heirs = Counter(
        holders(roles, Role.UNDERSTUDY, bucket)[0] for bucket in sorted(roles[100].owned)
    )
    assert set(heirs) == {101, 102, 103, 104}


def test_the_score_never_changes_since_nodes_of_different_versions_must_agree() -> None:
    assert _mix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF  # splitmix64's first output
    assert score(0, 1) == 0x9E0160293A33AAF7
    assert score(255, -1) == 0x97EA9ECCE2311226
    assert score(7, 2**62) == 0xA222C5527917569A


@given(st.integers(0, BUCKETS - 1), INCARNATIONS)
def test_two_nodes_never_tie_for_a_bucket(bucket: int, incarnations: set[int]) -> None:
    assert len({score(bucket, node) for node in incarnations}) == len(incarnations)


def test_only_the_nodes_that_serve_a_kind_are_ranked_for_it() -> None:
    nodes = {1: frozenset({"mail"}), 2: frozenset({"mail", "order"}), 3: frozenset({"order"})}
    mine = ranks(nodes, ["mail", "order", "unknown"], 2)
    for bucket in range(BUCKETS):
        for kind, peer in (("mail", 1), ("order", 3)):
            ahead = score(bucket, 2) > score(bucket, peer)
            assert mine.role(kind, bucket) is (Role.OWNER if ahead else Role.UNDERSTUDY)
        assert mine.role("unknown", bucket) is None
    owned = {b for b in range(BUCKETS) if score(b, 2) > min(score(b, 1), score(b, 3))}
    assert mine.owned == owned


def test_a_lone_node_owns_everything_and_stands_by_for_nobody() -> None:
    mine = ranks({5: KINDS}, KINDS, 5)
    assert mine.owned == frozenset(range(BUCKETS))
    assert mine.understudied == frozenset()


def test_a_node_that_is_not_listed_has_no_role() -> None:
    assert ranks({1: KINDS}, KINDS, 2) == Roles()
    assert Roles().role("mail", 0) is None


def test_gained_buckets_are_those_that_had_no_role_for_some_kind() -> None:
    five = dict.fromkeys(range(1, 6), KINDS)
    before = ranks(five, ["mail"], 1)
    assert before.gained(Roles()) == before.owned | before.understudied
    assert before.gained(before) == frozenset()
    after = ranks({n: five[n] for n in (1, 2, 3)}, ["mail"], 1)
    gained = after.gained(before)
    assert gained == (after.owned | after.understudied) - (before.owned | before.understudied)
    assert gained
    assert ranks(five, KINDS, 1).gained(before) == before.owned | before.understudied
