"""Every pair of statements that can meet, in both orders, with the locks held on purpose.

The first runs in a transaction and stays open; the second comes. It is seen to wait for the first,
or it answers while the first is still open. Then the first commits, or does not, and the second's
answer is the truth of that moment.

Each pair meets three times, since the default isolation of the role may be anything. delayq's own
connections pin read committed, so there nothing changes. In a caller's own transaction at a
stricter level whoever waited for what then committed has a conflict, which names itself; it is
never a false answer, and run again the transaction gets the true one.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from delayq.control import set_instant_codec
from delayq.errors import TransactionConflict
from delayq.failures import translated
from tests import meetings as m
from tests.helpers import PATIENCE_S, connect
from tests.meetings import AtOnce, Collides, Looks, Meeting, Place, Verb, Waits
from tests.model import check_tables
from tests.world import read_tables

if TYPE_CHECKING:
    from asyncpg.transaction import Transaction

    from delayq.database import Connection, Database

NOTHING = "nothing"
Levels = pytest.mark.parametrize("level", ["read committed", "repeatable read", "serializable"])

MEETINGS = [
    # --- a lease, then … ---
    Meeting(m.pending, m.lease, m.cancel, Waits("cancel_requested", "cancelled"),
            ("running (to end)", "cancelled")),
    Meeting(m.pending, m.lease, m.cancel_key, Waits("cancel_requested", "cancelled"),
            ("running (to end)", "cancelled")),
    Meeting(m.pending, m.lease, m.cancel_unlocked,
            AtOnce("locked", "cancel_requested", "cancelled"), ("running (to end)", "cancelled")),
    Meeting(m.pending, m.lease, m.reschedule, Waits("running", "moved"), ("running", "pending")),
    Meeting(m.pending, m.lease, m.reschedule_key, Waits("running", "moved"),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.reschedule_unlocked, AtOnce("locked", "running", "moved"),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.run_now, Waits("running", "moved"), ("running", "pending")),
    Meeting(m.pending, m.lease, m.cancel_keys_unlocked,
            AtOnce("locked", "cancel_requested", "cancelled"), ("running (to end)", "cancelled")),
    Meeting(m.pending, m.lease, m.reschedule_keys_unlocked, AtOnce("locked", "running", "moved"),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.replace_many, Waits("waits behind", "replaced"),
            ("running, then waiting", "pending")),
    Meeting(m.pending, m.lease, m.lease_elsewhere, AtOnce(NOTHING, NOTHING, "leased"),
            ("running", "running")),
    Meeting(m.pending, m.lease, m.replace, Waits("waits behind", "replaced"),
            ("running, then waiting", "pending")),
    Meeting(m.pending, m.lease, m.keep, Looks("found pending", "found running", "found pending"),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.insist, Looks("taken", "taken", "taken"),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.set_aside, Waits(NOTHING, "set aside"), ("running", "dead")),
    Meeting(m.pending, m.lease, m.adopt, AtOnce(NOTHING, NOTHING, NOTHING),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.bury, AtOnce("buried", NOTHING, NOTHING),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.drain, AtOnce("there", "there", "there"),
            ("running", "pending")),
    Meeting(m.pending, m.lease, m.revive, Looks("live", "live", "live"), ("running", "pending")),
    # --- a cancel, then … ---
    Meeting(m.pending, m.cancel, m.lease, AtOnce(NOTHING, NOTHING, "leased"),
            ("cancelled", "running")),
    Meeting(m.pending, m.cancel, m.cancel, Waits("already_finished", "cancelled"),
            ("cancelled", "cancelled")),
    Meeting(m.pending, m.cancel, m.cancel_key, Waits("not_found", "cancelled"),
            ("cancelled", "cancelled")),
    Meeting(m.pending, m.cancel_key, m.cancel, Waits("already_finished", "cancelled"),
            ("cancelled", "cancelled")),
    Meeting(m.pending, m.cancel, m.cancel_unlocked,
            AtOnce("locked", "already_finished", "cancelled"), ("cancelled", "cancelled")),
    Meeting(m.pending, m.cancel, m.reschedule, Waits("already_finished", "moved"),
            ("cancelled", "pending")),
    Meeting(m.pending, m.cancel, m.reschedule_key, Waits("not_found", "moved"),
            ("cancelled", "pending")),
    Meeting(m.pending, m.cancel, m.replace, Waits("created", "replaced"),
            ("cancelled", "pending")),
    Meeting(m.pending, m.cancel, m.replace_many, Waits("created", "replaced"),
            ("cancelled", "pending")),
    Meeting(m.pending, m.cancel, m.cancel_keys_unlocked,
            AtOnce("locked", "not_found", "cancelled"), ("cancelled", "cancelled")),
    Meeting(m.pending, m.cancel, m.keep, Looks("found pending", "created", "found pending"),
            ("cancelled", "pending")),
    Meeting(m.pending, m.cancel, m.insist, Looks("taken", "created", "taken"),
            ("cancelled", "pending")),
    Meeting(m.pending, m.cancel, m.insert, Collides("inserted", "taken"), ("cancelled", "pending")),
    Meeting(m.pending, m.cancel, m.set_aside, Waits(NOTHING, "set aside"), ("cancelled", "dead")),
    Meeting(m.pending, m.cancel, m.revive, Looks("live", "already_finished", "live"),
            ("cancelled", "pending")),
    Meeting(m.running, m.cancel, m.retry, AtOnce(NOTHING, "cancelled", "retry"),
            ("cancelled", "pending")),
    Meeting(m.running, m.cancel, m.release, AtOnce(NOTHING, "cancelled", "release"),
            ("cancelled", "pending")),
    Meeting(m.running, m.cancel, m.give_up, AtOnce(NOTHING, "cancelled", "dead"),
            ("cancelled", "dead")),
    Meeting(m.running, m.cancel, m.succeed, AtOnce(NOTHING, "succeeded", "succeeded"),
            ("succeeded", "succeeded")),
    Meeting(m.running, m.cancel, m.effect, Waits("settled", "settled"),
            ("succeeded", "succeeded")),
    Meeting(m.orphaned, m.cancel, m.adopt, AtOnce(NOTHING, "cancelled", "adopt"),
            ("cancelled", "pending")),
    Meeting(m.running, m.cancel, m.cancel, Waits("cancel_requested", "cancel_requested"),
            ("running (to end)", "running (to end)")),
    Meeting(m.running, m.cancel, m.reschedule, Waits("running", "running"),
            ("running (to end)", "running")),
    Meeting(m.running, m.cancel, m.replace, Waits("waits behind", "waits behind"),
            ("running (to end), then waiting", "running, then waiting")),
    Meeting(m.followed, m.cancel_follow_up, m.succeed,
            AtOnce(NOTHING, "succeeded", "succeeded"),
            ("succeeded, then cancelled", "succeeded, then pending")),
    Meeting(m.followed, m.cancel_follow_up, m.retry, AtOnce(NOTHING, "retry", "cancelled"),
            ("pending, then cancelled", "cancelled, then pending")),
    Meeting(m.followed, m.cancel_follow_up, m.cancel_follow_up,
            Waits("already_finished", "cancelled"),
            ("running, then cancelled", "running, then cancelled")),
    Meeting(m.followed, m.cancel_follow_up, m.reschedule_follow_up,
            Waits("already_finished", "moved"),
            ("running, then cancelled", "running, then waiting")),
    Meeting(m.followed, m.cancel_follow_up, m.replace, Waits("waits behind", "waits behind"),
            ("running, then waiting", "running, then waiting")),
    Meeting(m.followed, m.cancel_key, m.retry, AtOnce(NOTHING, "cancelled", "cancelled"),
            ("cancelled, then cancelled", "cancelled, then pending")),
    Meeting(m.followed, m.cancel_key, m.effect, Waits("settled", "settled"),
            ("succeeded, then cancelled", "succeeded, then pending")),
    # --- a move, then … ---
    Meeting(m.pending, m.reschedule, m.lease, AtOnce(NOTHING, NOTHING, "leased"),
            ("pending", "running")),
    Meeting(m.far_ahead, m.run_now, m.lease, AtOnce(NOTHING, "leased", NOTHING),
            ("running", "pending")),
    Meeting(m.pending, m.reschedule, m.cancel, Waits("cancelled", "cancelled"),
            ("cancelled", "cancelled")),
    Meeting(m.pending, m.reschedule_key, m.cancel_key, Waits("cancelled", "cancelled"),
            ("cancelled", "cancelled")),
    Meeting(m.pending, m.reschedule, m.reschedule, Waits("moved", "moved"),
            ("pending", "pending")),
    Meeting(m.pending, m.reschedule, m.replace, Waits("replaced", "replaced"),
            ("pending", "pending")),
    Meeting(m.pending, m.reschedule, m.keep,
            Looks("found pending", "found pending", "found pending"), ("pending", "pending")),
    Meeting(m.pending, m.reschedule, m.set_aside, Waits("set aside", "set aside"),
            ("dead", "dead")),
    Meeting(m.followed, m.reschedule_follow_up, m.succeed,
            AtOnce(NOTHING, "succeeded", "succeeded"),
            ("succeeded, then pending", "succeeded, then pending")),
    Meeting(m.followed, m.reschedule_follow_up, m.cancel_follow_up,
            Waits("cancelled", "cancelled"),
            ("running, then cancelled", "running, then cancelled")),
    # --- a replacement, then … ---
    Meeting(m.pending, m.replace, m.lease, AtOnce(NOTHING, "leased", "leased"),
            ("running", "running")),
    Meeting(m.pending, m.replace, m.cancel, Waits("cancelled", "cancelled"),
            ("cancelled", "cancelled")),
    Meeting(m.pending, m.replace, m.reschedule, Waits("moved", "moved"), ("pending", "pending")),
    Meeting(m.pending, m.replace, m.replace, Waits("replaced", "replaced"),
            ("pending", "pending")),
    Meeting(m.pending, m.replace, m.keep,
            Looks("found pending", "found pending", "found pending"), ("pending", "pending")),
    Meeting(m.running, m.replace, m.succeed,
            AtOnce(NOTHING, "succeeded", "succeeded"),
            ("succeeded, then pending", "succeeded, then nowhere")),
    Meeting(m.running, m.replace, m.retry, AtOnce(NOTHING, "cancelled", "retry"),
            ("cancelled, then pending", "pending, then nowhere")),
    Meeting(m.running, m.replace, m.give_up, AtOnce(NOTHING, "dead", "dead"),
            ("dead, then pending", "dead, then nowhere")),
    Meeting(m.running, m.replace, m.effect, Waits("settled", "settled"),
            ("succeeded, then pending", "succeeded, then nowhere")),
    Meeting(m.orphaned, m.replace, m.adopt, AtOnce(NOTHING, "cancelled", "adopt"),
            ("cancelled, then pending", "pending, then nowhere")),
    Meeting(m.running, m.replace, m.cancel, Waits("cancel_requested", "cancel_requested"),
            ("running (to end), then waiting", "running (to end), then nowhere")),
    Meeting(m.running, m.replace, m.cancel_key, Waits("cancel_requested", "cancel_requested"),
            ("running (to end), then cancelled", "running (to end), then nowhere")),
    Meeting(m.running, m.replace, m.cancel_follow_up, Looks("not_found", "cancelled", "not_found"),
            ("running, then cancelled", "running, then nowhere")),
    Meeting(m.running, m.replace, m.reschedule_follow_up, Looks("not_found", "moved", "not_found"),
            ("running, then waiting", "running, then nowhere")),
    Meeting(m.running, m.replace, m.reschedule, Waits("running", "running"),
            ("running, then waiting", "running, then nowhere")),
    Meeting(m.running, m.replace, m.replace, Waits("waits behind", "waits behind"),
            ("running, then waiting", "running, then waiting")),
    # --- a settlement, then … ---
    Meeting(m.running, m.succeed, m.cancel, Waits("already_finished", "cancel_requested"),
            ("succeeded", "running (to end)")),
    Meeting(m.running, m.succeed, m.cancel_key, Waits("not_found", "cancel_requested"),
            ("succeeded", "running (to end)")),
    Meeting(m.running, m.succeed, m.cancel_unlocked,
            AtOnce("locked", "already_finished", "cancel_requested"),
            ("succeeded", "running (to end)")),
    Meeting(m.running, m.succeed, m.reschedule, Waits("already_finished", "running"),
            ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.cancel_keys_unlocked,
            AtOnce("locked", "not_found", "cancel_requested"), ("succeeded", "running (to end)")),
    Meeting(m.running, m.succeed, m.reschedule_keys_unlocked,
            AtOnce("locked", "not_found", "running"), ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.replace_many, Waits("created", "waits behind"),
            ("succeeded", "running, then waiting")),
    Meeting(m.running, m.succeed, m.reschedule_unlocked,
            AtOnce("locked", "already_finished", "running"), ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.succeed, AtOnce(NOTHING, NOTHING, "succeeded"),
            ("succeeded", "succeeded")),
    Meeting(m.running, m.succeed, m.tell_apart, AtOnce("running", "succeeded", "running"),
            ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.retry, AtOnce(NOTHING, NOTHING, "retry"),
            ("succeeded", "pending")),
    Meeting(m.running, m.succeed, m.effect, Waits("already_settled", "settled"),
            ("succeeded", "succeeded")),
    Meeting(m.orphaned, m.succeed, m.adopt, AtOnce(NOTHING, NOTHING, "adopt"),
            ("succeeded", "pending")),
    Meeting(m.running, m.succeed, m.replace, Waits("created", "waits behind"),
            ("succeeded", "running, then waiting")),
    Meeting(m.running, m.succeed, m.keep, Looks("found running", "created", "found running"),
            ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.insist, Looks("taken", "created", "taken"),
            ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.insert, Collides("inserted", "taken"),
            ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.lease_elsewhere, AtOnce(NOTHING, NOTHING, NOTHING),
            ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.revive, Looks("live", "already_finished", "live"),
            ("succeeded", "running")),
    Meeting(m.running, m.succeed, m.set_aside, AtOnce(NOTHING, NOTHING, NOTHING),
            ("succeeded", "running")),
    Meeting(m.asked_to_end, m.retry, m.cancel, Waits("already_finished", "cancel_requested"),
            ("cancelled", "running (to end)")),
    Meeting(m.running, m.retry, m.cancel, Waits("cancelled", "cancel_requested"),
            ("cancelled", "running (to end)")),
    Meeting(m.running, m.retry, m.reschedule, Waits("retry_moved", "running"),
            ("pending", "running")),
    Meeting(m.running, m.retry, m.lease_elsewhere, AtOnce(NOTHING, "leased", NOTHING),
            ("running", "running")),
    Meeting(m.running, m.retry, m.retry, AtOnce(NOTHING, NOTHING, "retry"),
            ("pending", "pending")),
    Meeting(m.running, m.retry, m.tell_apart, AtOnce("running", "lost", "running"),
            ("pending", "running")),
    Meeting(m.running, m.retry, m.replace, Waits("replaced", "waits behind"),
            ("pending", "running, then waiting")),
    Meeting(m.running, m.retry, m.keep, Looks("found running", "found pending", "found running"),
            ("pending", "running")),
    Meeting(m.running, m.retry, m.effect, Waits("lost", "settled"), ("pending", "succeeded")),
    Meeting(m.running, m.retry, m.set_aside, AtOnce(NOTHING, "set aside", NOTHING),
            ("dead", "running")),
    Meeting(m.running, m.give_up, m.revive, Looks("live", "revived", "live"),
            ("pending", "running")),
    Meeting(m.running, m.give_up, m.discard, Looks("live", "discarded", "live"),
            ("nowhere", "running")),
    Meeting(m.running, m.give_up, m.cancel, Waits("already_finished", "cancel_requested"),
            ("dead", "running (to end)")),
    Meeting(m.running, m.give_up, m.reschedule, Waits("dead", "running"), ("dead", "running")),
    Meeting(m.running, m.give_up, m.effect, Waits("lost", "settled"), ("dead", "succeeded")),
    Meeting(m.running, m.give_up, m.tell_apart, AtOnce("running", "dead", "running"),
            ("dead", "running")),
    Meeting(m.running, m.give_up, m.replace, Waits("created", "waits behind"),
            ("dead", "running, then waiting")),
    Meeting(m.followed, m.succeed, m.keep,
            Looks("found running", "found pending", "found running"),
            ("succeeded, then pending", "running, then waiting")),
    Meeting(m.followed, m.succeed, m.insist, Looks("taken", "taken", "taken"),
            ("succeeded, then pending", "running, then waiting")),
    Meeting(m.followed, m.succeed, m.replace, Waits("replaced", "waits behind"),
            ("succeeded, then pending", "running, then waiting")),
    Meeting(m.followed, m.succeed, m.insert, Collides("taken", "taken"),
            ("succeeded, then pending", "running, then waiting")),
    Meeting(m.followed, m.succeed, m.cancel_key,
            Waits("cancelled", "cancel_requested"),
            ("succeeded, then cancelled", "running (to end), then cancelled")),
    Meeting(m.followed, m.succeed, m.cancel_keys_unlocked,
            AtOnce("locked", "cancelled", "cancel_requested"),
            ("succeeded, then cancelled", "running (to end), then cancelled")),
    Meeting(m.followed, m.succeed, m.replace_many, Waits("replaced", "waits behind"),
            ("succeeded, then pending", "running, then waiting")),
    Meeting(m.followed, m.succeed, m.cancel_follow_up,
            Waits("cancelled", "cancelled"),
            ("succeeded, then cancelled", "running, then cancelled")),
    Meeting(m.followed, m.succeed, m.reschedule_follow_up, Waits("moved", "moved"),
            ("succeeded, then pending", "running, then waiting")),
    Meeting(m.followed, m.succeed, m.lease_follow_up,
            AtOnce(NOTHING, "leased", NOTHING),
            ("succeeded, then running", "running, then waiting")),
    Meeting(m.dead_and_followed, m.succeed, m.revive_other,
            Waits("key_taken", "key_taken"),
            ("succeeded, then pending", "running, then waiting")),
    Meeting(m.followed, m.retry, m.effect, Waits("already_settled", "settled"),
            ("cancelled, then pending", "succeeded, then pending")),
    # --- the settlement of an effect, then … ---
    Meeting(m.running, m.effect, m.cancel, Waits("already_finished", "cancel_requested"),
            ("succeeded", "running (to end)")),
    Meeting(m.running, m.effect, m.reschedule, Waits("already_finished", "running"),
            ("succeeded", "running")),
    Meeting(m.running, m.effect, m.replace, Waits("created", "waits behind"),
            ("succeeded", "running, then waiting")),
    Meeting(m.running, m.effect, m.keep, Looks("found running", "created", "found running"),
            ("succeeded", "running")),
    Meeting(m.running, m.effect, m.effect, Waits("already_settled", "settled"),
            ("succeeded", "succeeded")),
    Meeting(m.running, m.effect, m.succeed, AtOnce(NOTHING, NOTHING, "succeeded"),
            ("succeeded", "succeeded")),
    Meeting(m.running, m.effect, m.retry, AtOnce(NOTHING, NOTHING, "retry"),
            ("succeeded", "pending")),
    Meeting(m.running, m.effect, m.tell_apart, AtOnce("running", "succeeded", "running"),
            ("succeeded", "running")),
    Meeting(m.orphaned, m.effect, m.adopt, AtOnce(NOTHING, NOTHING, "adopt"),
            ("succeeded", "pending")),
    Meeting(m.orphaned_and_followed, m.effect, m.adopt, AtOnce(NOTHING, NOTHING, "cancelled"),
            ("succeeded, then pending", "cancelled, then pending")),
    Meeting(m.requested, m.effect, m.request,
            Looks("found running", "found succeeded", "found running"),
            ("succeeded", "running")),
    Meeting(m.requested_twice, m.effect, m.effect_of_other, Waits("already_applied", "settled"),
            ("succeeded", "running")),
    # --- an adoption, then … ---
    Meeting(m.orphaned, m.adopt, m.adopt, AtOnce(NOTHING, NOTHING, "adopt"),
            ("pending", "pending")),
    Meeting(m.orphaned, m.adopt, m.succeed, AtOnce(NOTHING, NOTHING, "succeeded"),
            ("pending", "succeeded")),
    Meeting(m.orphaned, m.adopt, m.tell_apart, AtOnce("running", "lost", "running"),
            ("pending", "running")),
    Meeting(m.orphaned, m.adopt, m.effect, Waits("lost", "settled"), ("pending", "succeeded")),
    Meeting(m.orphaned, m.adopt, m.cancel, Waits("cancelled", "cancel_requested"),
            ("cancelled", "running (to end)")),
    Meeting(m.orphaned, m.adopt, m.reschedule, Waits("retry_moved", "running"),
            ("pending", "running")),
    Meeting(m.orphaned, m.adopt, m.replace, Waits("replaced", "waits behind"),
            ("pending", "running, then waiting")),
    Meeting(m.orphaned, m.adopt, m.keep,
            Looks("found running", "found pending", "found running"), ("pending", "running")),
    Meeting(m.orphaned, m.adopt, m.lease_elsewhere, AtOnce(NOTHING, "leased", NOTHING),
            ("running", "running")),
    Meeting(m.orphaned_and_followed, m.adopt, m.cancel_follow_up,
            Waits("cancelled", "cancelled"),
            ("cancelled, then cancelled", "running, then cancelled")),
    Meeting(m.orphaned_and_followed, m.adopt, m.cancel_key,
            Waits("cancelled", "cancel_requested"),
            ("cancelled, then cancelled", "running (to end), then cancelled")),
    # --- a burial, then … ---
    Meeting(m.pending, m.bury, m.lease, AtOnce("leased", NOTHING, NOTHING),
            ("running", "running")),
    Meeting(m.running, m.bury, m.adopt, AtOnce(NOTHING, "adopt", NOTHING),
            ("pending", "running")),
    Meeting(m.running, m.bury, m.succeed, AtOnce("succeeded", NOTHING, NOTHING),
            ("succeeded", "succeeded")),
    Meeting(m.pending, m.drain, m.lease, AtOnce("leased", NOTHING, NOTHING),
            ("running", "running")),
    Meeting(m.pending, m.leave, m.lease, AtOnce("leased", NOTHING, NOTHING),
            ("running", "running")),
    Meeting(m.running, m.leave, m.adopt, AtOnce(NOTHING, "adopt", NOTHING),
            ("pending", "running")),
    Meeting(m.orphaned, m.forget, m.adopt, AtOnce("adopt", NOTHING, NOTHING),
            ("pending", "pending")),
    # --- a revival, then … ---
    Meeting(m.dead, m.revive, m.revive, Waits("live", "revived"), ("pending", "pending")),
    Meeting(m.dead, m.revive, m.discard, Waits("live", "discarded"), ("pending", "nowhere")),
    Meeting(m.dead, m.revive, m.cancel,
            Looks("already_finished", "cancelled", "already_finished"), ("cancelled", "dead")),
    Meeting(m.dead, m.revive, m.reschedule, Looks("dead", "moved", "dead"), ("pending", "dead")),
    Meeting(m.dead, m.revive, m.lease_elsewhere, AtOnce(NOTHING, "leased", NOTHING),
            ("running", "dead")),
    Meeting(m.dead, m.revive, m.keep, Waits("found pending", "created"), ("pending", "dead")),
    Meeting(m.dead, m.revive, m.replace, Waits("replaced", "created"), ("pending", "dead")),
    Meeting(m.dead, m.revive, m.insist, Waits("taken", "created"), ("pending", "dead")),
    Meeting(m.dead, m.revive, m.insert, Collides("taken", "inserted"), ("pending", "dead")),
    Meeting(m.dead, m.revive, m.cancel_key, Looks("not_found", "cancelled", "not_found"),
            ("cancelled", "dead")),
    Meeting(m.dead, m.revive, m.cancel_keys_unlocked, Looks("not_found", "cancelled", "not_found"),
            ("cancelled", "dead")),
    Meeting(m.dead, m.revive, m.replace_many, Waits("replaced", "created"), ("pending", "dead")),
    Meeting(m.two_dead, m.revive, m.revive_other, Waits("key_taken", "revived"),
            ("pending", "dead")),
    Meeting(m.dead, m.discard, m.discard, Waits("not_found", "discarded"),
            ("nowhere", "nowhere")),
    Meeting(m.dead, m.discard, m.revive, Waits("not_found", "revived"), ("nowhere", "pending")),
    Meeting(m.dead, m.discard, m.cancel,
            AtOnce("already_finished", "not_found", "already_finished"), ("nowhere", "dead")),
    # --- somebody who takes a key, then … ---
    Meeting(m.nobody, m.keep, m.cancel_key, Looks("not_found", "cancelled", "not_found"),
            ("none live", "none live")),
    Meeting(m.nobody, m.keep, m.reschedule_key, Looks("not_found", "moved", "not_found"),
            ("1 live", "none live")),
    Meeting(m.nobody, m.keep, m.insert, Collides("taken", "inserted"), ("1 live", "1 live")),
    Meeting(m.nobody, m.keep, m.keep, Waits("found pending", "created"), ("1 live", "1 live")),
    Meeting(m.nobody, m.keep, m.replace, Waits("replaced", "created"), ("1 live", "1 live")),
    Meeting(m.nobody, m.keep, m.replace_many, Waits("replaced", "created"),
            ("2 live", "2 live")),
    Meeting(m.nobody, m.replace_many, m.replace_many, Waits("replaced", "created"),
            ("2 live", "2 live")),
    Meeting(m.nobody, m.keep, m.insist, Waits("taken", "created"), ("1 live", "1 live")),
    Meeting(m.dead, m.keep, m.revive, Waits("key_taken", "revived"), ("dead", "pending")),
    Meeting(m.nobody, m.insert, m.insert, Collides("taken", "inserted"), ("1 live", "1 live")),
    Meeting(m.nobody, m.request, m.request, Waits("found pending", "created"),
            ("1 live", "1 live")),
    Meeting(m.requested_long_ago, m.prune, m.request,
            AtOnce("found succeeded", "created", "found succeeded"),
            ("succeeded", "succeeded")),
    # --- somebody who sets a task aside, then … ---
    Meeting(m.pending, m.set_aside, m.lease, AtOnce(NOTHING, NOTHING, "leased"),
            ("dead", "running")),
    Meeting(m.pending, m.set_aside, m.set_aside, Waits(NOTHING, "set aside"), ("dead", "dead")),
    Meeting(m.pending, m.set_aside, m.cancel, Waits("already_finished", "cancelled"),
            ("dead", "cancelled")),
    Meeting(m.pending, m.set_aside, m.reschedule, Waits("dead", "moved"), ("dead", "pending")),
    Meeting(m.pending, m.set_aside, m.revive, Looks("live", "revived", "live"),
            ("pending", "pending")),
    Meeting(m.pending, m.set_aside, m.replace, Waits("created", "replaced"),
            ("dead", "pending")),
]  # fmt: skip

# What is left is the row of the node here.
MEETINGS_OF_NODES = [
    Meeting(m.nobody, m.bury, m.beat, Waits("buried", "active"), ("dead", "active")),
    Meeting(m.nobody, m.bury, m.bury, Waits(NOTHING, "buried"), ("dead", "dead")),
    Meeting(m.nobody, m.bury, m.drain, Waits("there", "there"), ("dead", "draining")),
    Meeting(m.nobody, m.bury, m.ask_drain, Waits(NOTHING, "asked"), ("dead", "draining")),
    Meeting(m.nobody, m.bury, m.leave, Waits("there", "there"), ("dead", "nowhere")),
    Meeting(m.nobody, m.bury, m.leave_in_a_hurry, Waits("there", "there"), ("dead", "dead")),
    Meeting(m.nobody, m.bury, m.forget, AtOnce(NOTHING, "forgotten", NOTHING),
            ("nowhere", "active")),
    Meeting(m.nobody, m.beat, m.bury, Waits(NOTHING, "buried"), ("active", "dead")),
    Meeting(m.nobody, m.beat, m.beat, Waits("active", "active"), ("active", "active")),
    Meeting(m.nobody, m.beat, m.drain, Waits("there", "there"), ("draining", "draining")),
    Meeting(m.nobody, m.beat, m.ask_drain, Waits("asked", "asked"), ("draining", "draining")),
    Meeting(m.nobody, m.beat, m.leave, Waits("there", "there"), ("nowhere", "nowhere")),
    Meeting(m.nobody, m.drain, m.beat, Waits("draining", "active"), ("draining", "active")),
    Meeting(m.nobody, m.drain, m.bury, Waits("buried", "buried"), ("dead", "dead")),
    Meeting(m.nobody, m.drain, m.ask_drain, Waits(NOTHING, "asked"), ("draining", "draining")),
    Meeting(m.nobody, m.ask_drain, m.beat, Waits("draining", "active"), ("draining", "active")),
    Meeting(m.joining, m.drain, m.activate, Waits(NOTHING, "active"), ("draining", "active")),
    Meeting(m.joining, m.bury, m.activate, Waits(NOTHING, "active"), ("dead", "active")),
    Meeting(m.joining, m.activate, m.bury, Waits("buried", "buried"), ("dead", "dead")),
    Meeting(m.nobody, m.leave, m.beat, Waits("buried", "active"), ("nowhere", "active")),
    Meeting(m.nobody, m.leave, m.bury, Waits(NOTHING, "buried"), ("nowhere", "dead")),
    Meeting(m.nobody, m.leave_in_a_hurry, m.beat, Waits("buried", "active"), ("dead", "active")),
    Meeting(m.no_node, m.register, m.register, Waits("there", "there"), ("joining", "joining")),
]  # fmt: skip


# What may have happened to a task since a caller's snapshot was taken, and what he may ask then.
SINCE = [
    Meeting(scene, first, second, AtOnce("", "", ""), ("", ""))
    for scene, firsts, seconds in [
        (m.nobody, [m.come, m.come_and_go, m.come_and_die, m.come_and_run, m.come_and_retry],
         [*m.BY_ID, *m.BY_KEY]),
        (m.pending, [m.cancel, m.reschedule, m.replace, m.set_aside],
         [*m.BY_ID, *m.BY_KEY]),
        (m.far_ahead, [m.run_now], [*m.BY_ID, *m.BY_KEY]),
        (m.running, [m.succeed, m.retry, m.give_up, m.release, m.cancel, m.effect],
         [*m.BY_ID, *m.BY_KEY, m.effect]),
        (m.orphaned, [m.adopt], [*m.BY_ID, *m.BY_KEY, m.effect]),
        (m.running, [m.replace], [*m.BY_ID, *m.BY_KEY, *m.BY_FOLLOW_UP, m.effect]),
        (m.followed, [m.succeed, m.retry, m.give_up, m.cancel_key, m.cancel_follow_up, m.replace,
                      m.reschedule_follow_up],
         [*m.BY_ID, *m.BY_KEY, *m.BY_FOLLOW_UP]),
        (m.dead, [m.revive, m.discard, m.keep], [*m.BY_ID, *m.BY_KEY]),
        (m.pending, [m.start], [*m.BY_ID, *m.BY_KEY, m.effect]),
        (m.requested, [m.effect, m.retry, m.cancel, m.give_up], [m.request]),
        (m.nobody, [m.request], [m.request]),
    ]
    for first in firsts
    for second in seconds
]  # fmt: skip


EMPTY = """
    delete from delayq.tasks; delete from delayq.task_history; delete from delayq.dead_tasks;
    delete from delayq.idempotency; delete from delayq.nodes;
"""
COMMITTED = "read committed"
# Of what came and went since, or was discarded, an old snapshot may say either: there is nothing
# left to be done.
OVER = {"not_found", "already_finished", "dead"}


@dataclass
class Table:
    """Where two sit: on connections of delayq's or of an application's, as the role has them."""

    database: Database
    conn: Connection
    level: str
    own: list[Connection]
    callers: list[Connection]

    async def laid(self, meeting: Meeting) -> Place:
        """The scene of a meeting, and nothing else."""
        await self.conn.execute(EMPTY)
        place = Place(self.database, self.conn)
        await meeting.scene(place)
        return place

    def seats(self, meeting: Meeting, *, callers: bool) -> tuple[Connection, Connection]:
        """The connections of the first and of the second; nodes always sit on their own."""
        first, second = (
            self.callers if callers and verb not in m.NODES_OWN else self.own
            for verb in (meeting.first, meeting.second)
        )
        return first[0], second[1]


@asynccontextmanager
async def table(conn: Connection, dsn: str, database: Database, level: str) -> AsyncIterator[Table]:
    """Seats for two; `level` is the default isolation of their role."""
    name = await conn.fetchval("select current_database()")
    await conn.execute(
        f'alter role current_user in database "{name}"'
        f" set default_transaction_isolation = '{level}'"
    )
    await set_instant_codec(conn)
    async with AsyncExitStack() as stack:
        callers = [await connect(dsn) for _ in range(2)]
        own = [await database.connect_control(m.NODE, "meeting") for _ in range(2)]
        for one in (*own, *callers):
            stack.callback(one.terminate)
            await set_instant_codec(one)
        levels = [await one.fetchval("show transaction_isolation") for one in (*own, *callers)]
        assert levels == [COMMITTED, COMMITTED, level, level]
        yield Table(database, conn, level, own, callers)


async def meet(at: Table, meeting: Meeting, end: str, *, callers: bool) -> Place:
    """Let them meet once: who waits, and what the second is told."""
    place = await at.laid(meeting)
    first, second = at.seats(meeting, callers=callers)
    callers_own = second in at.callers
    above = callers_own and at.level != COMMITTED
    expected = meeting.expected.above() if above else meeting.expected

    def ask() -> asyncio.Task[str]:
        said = m.in_words(second, meeting.second(place, second), transaction=callers_own)
        return asyncio.create_task(said)

    async with asyncio.timeout(PATIENCE_S):
        transaction = first.transaction()
        await transaction.start()
        await meeting.first(place, first)
        work = ask()
        try:
            if isinstance(expected, AtOnce):
                assert await work == expected.answer  # while the first is still open
            else:
                await m.seen_to_wait(place, work, *_pids(second, first))
            await _end(transaction, end)
            if isinstance(expected, AtOnce):
                assert await ask() == getattr(expected, end)
            elif getattr(expected, end) == m.CONFLICT:
                with pytest.raises(TransactionConflict):
                    await work
                assert await ask() == getattr(meeting.expected, end)  # run again
            else:
                assert await work == getattr(expected, end)
        finally:
            await _give_up(work)
    return place


async def _give_up(work: asyncio.Task[str]) -> None:
    """Unless it is over: after a failure nobody is to talk on these connections any more."""
    work.cancel()
    await asyncio.wait([work])


def _pids(*connections: Connection) -> list[int]:
    return [one.get_server_pid() for one in connections]


async def _end(transaction: Transaction, end: str) -> None:
    await (transaction.commit() if end == "commit" else transaction.rollback())


def _firsts(meetings: list[Meeting]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("first", sorted({one.first.__name__ for one in meetings}))


@contextmanager
def named(*what: object) -> Iterator[None]:
    """A failure says where it happened."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at this meeting: {what}")
        raise


@Levels
@_firsts(MEETINGS)
async def test_whoever_comes_second_to_a_task_is_told_the_truth(
    conn: Connection, dsn: str, database: Database, first: str, level: str
) -> None:
    async with table(conn, dsn, database, level) as at:
        for meeting in [one for one in MEETINGS if one.first.__name__ == first]:
            nodes_alone = {meeting.first, meeting.second} <= m.NODES_OWN
            for callers in [False] if nodes_alone else [False, True]:
                for end, left in zip(("commit", "rollback"), meeting.left, strict=True):
                    with named(meeting.name, end, callers):
                        place = await meet(at, meeting, end, callers=callers)
                        assert await m.left_of(place) == left
                        check_tables(await read_tables(conn))


@Levels
@_firsts(MEETINGS_OF_NODES)
async def test_whoever_comes_second_to_the_row_of_a_node_is_told_the_truth(
    conn: Connection, dsn: str, database: Database, first: str, level: str
) -> None:
    async with table(conn, dsn, database, level) as at:
        for meeting in [one for one in MEETINGS_OF_NODES if one.first.__name__ == first]:
            for end, left in zip(("commit", "rollback"), meeting.left, strict=True):
                with named(meeting.name, end):
                    place = await meet(at, meeting, end, callers=False)
                    assert await m.state_of_node(place) == left


@Levels
async def test_a_caller_who_found_a_key_taken_holds_up_nobody(
    conn: Connection, dsn: str, database: Database, level: str
) -> None:
    async with table(conn, dsn, database, level) as at:
        place = Place(database, conn)
        await m.running(place)
        async with at.callers[0].transaction():
            assert await m.keep(place, at.callers[0]) == "found running"
            assert await m.succeed(place, at.own[1]) == "succeeded"
        assert await m.left_of(place) == "succeeded"


@Levels
async def test_the_pools_of_clients_and_of_effects_pin_read_committed(
    conn: Connection, dsn: str, database: Database, level: str
) -> None:
    async with table(conn, dsn, database, level), AsyncExitStack() as stack:
        for name, shared in (("delayq client", False), (f"delayq/{m.NODE}", True)):
            pool = await database.create_pool(0, 1, name, shared=shared)
            stack.callback(pool.terminate)
            for _ in range(2):  # a reset is not to take it away
                async with pool.acquire() as pooled:
                    assert await pooled.fetchval("show transaction_isolation") == COMMITTED


@pytest.mark.parametrize("end_of_node", [m.bury, m.leave, m.leave_in_a_hurry])
async def test_a_lease_that_slips_in_beside_the_end_of_its_node_is_adopted_and_fenced(
    conn: Connection, dsn: str, database: Database, end_of_node: Verb
) -> None:
    """It cannot know of an end that has not committed; whoever adopts does."""
    async with table(conn, dsn, database, COMMITTED) as at:
        place = Place(database, conn)
        await m.pending(place)
        first, second = at.own
        async with first.transaction():
            await end_of_node(place, first)
            assert await m.start(place, second) == "running"
            assert await m.adopt(place, second) == NOTHING
        assert await m.adopt(place, second) == "adopt"
        assert await m.succeed(place, second) == NOTHING
        assert await m.effect(place, second) == "lost"
        assert await m.left_of(place) == "pending"


MANY = {
    "cancel": ("select answer from delayq.cancel_many($1)", "cancelled"),
    "move": ("select answer from delayq.run_now_many($1)", "moved"),
    "revive": ("select answer from delayq.revive_many($1)", "revived"),
    "discard": ("select answer from delayq.discard_many($1)", "discarded"),
}


@pytest.mark.parametrize("verb", MANY)
async def test_two_who_name_the_same_tasks_in_another_order_do_not_deadlock(
    conn: Connection, dsn: str, database: Database, verb: str
) -> None:
    """Locks are taken in one order: whoever waits for the lower one does not hold the higher."""
    sql, done = MANY[verb]
    async with table(conn, dsn, database, COMMITTED) as at:
        first, second = at.own
        place = Place(database, conn)
        await (m.two_dead if verb in ("revive", "discard") else m.two_pending)(place)
        lower, higher = sorted((place.task, place.other))
        async with first.transaction():
            assert await first.fetchval(sql, [lower]) == done
            work = asyncio.create_task(second.fetch(sql, [higher, lower]))
            await m.seen_to_wait(place, work, *_pids(second, first))
            assert await first.fetchval(sql, [higher]) in (done, "key_taken")
        async with asyncio.timeout(PATIENCE_S):
            assert len(await work) == 2
        check_tables(await read_tables(conn))


# --- what happened since the snapshot -------------------------------------------------------------


@pytest.mark.parametrize("level", ["repeatable read", "serializable"])
@_firsts(SINCE)
async def test_an_old_snapshot_is_a_conflict_or_has_the_true_answer(
    conn: Connection, dsn: str, database: Database, first: str, level: str
) -> None:
    """The truth is what a transaction is told that begins now."""
    false = []
    async with table(conn, dsn, database, level) as at:
        for meeting in [one for one in SINCE if one.first.__name__ == first]:
            with named(meeting.name):
                place = await at.laid(meeting)
                second = at.callers[1]
                transaction = second.transaction()
                await transaction.start()
                assert await second.fetchval("select count(*) from delayq.tasks") is not None
                await meeting.first(place, at.own[0])
                said = await _said(meeting.second(place, second))
                await transaction.rollback()
                truth = await _truth(at, meeting, place)
                if said not in (m.CONFLICT, truth) and not {said, truth} <= OVER:
                    false.append((meeting.name, said, truth))
    assert false == []


async def _said(verb: Awaitable[str]) -> str:
    try:
        with translated():
            return await verb
    except TransactionConflict:
        return m.CONFLICT


async def _truth(at: Table, meeting: Meeting, place: Place) -> str:
    transaction = at.own[1].transaction()
    await transaction.start()
    try:
        return await meeting.second(place, at.own[1])
    finally:
        await transaction.rollback()
