"""Votes of ranks on a depth, with every message lost, late, repeated or out of order, and every rank dead."""

import tracemalloc

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.controller.ranks_rig import Post, facts, greet, joined
from tests.examples import example_count
from tiercache.controller.ranks.ballots import MAX_BALLOTS
from tiercache.controller.ranks.base import LEADER, Decision, Message, MessageKind, unpack
from tiercache.controller.ranks.session import RankSession
from tiercache.core import Reason
from tiercache.errors import RankError, WireError
from tiercache.keys import Shard


class Rank:
    """A rank's part in one request: what it has at hand, what it may fetch, and what then turns out lost."""

    def __init__(self, session, near, far, lost):
        self.session, self.near, self.far, self.lost = session, set(near), set(far), set(lost)
        self.agreement = None
        self.promised = set()

    def step(self):
        """Do what its engine's thread does at a poll."""
        if self.agreement is None:
            self.agreement = self.session.begin()
        agreement = self.agreement
        if agreement.decision is not None or agreement.has_voted:
            return
        target = 0 if agreement.allowed is None else agreement.allowed.bit_length()
        if target in self.far:
            self.far.discard(target)
            if target not in self.lost:
                self.near.add(target)
        possible = mask(self.near | self.far)
        if agreement.allowed is not None:
            possible &= agreement.allowed
        ready = (mask(self.near) & possible).bit_length()
        self.promised = {0, ready}
        agreement.vote(possible, ready)

    @property
    def depth(self):
        return (
            None if self.agreement is None or not self.agreement.decision else self.agreement.decision.depth
        )


def mask(depths):
    return sum(1 << depth - 1 for depth in depths)


DEPTHS = st.sets(st.integers(1, 6))


@st.composite
def ranks(draw, most=4):
    """Draw what each rank has: near, far, and the part of far that is lost."""
    return [
        (draw(DEPTHS), far := draw(DEPTHS), draw(st.sets(st.sampled_from(sorted(far)))) if far else set())
        for _ in range(draw(st.integers(2, most)))
    ]


def common(has):
    return max(set.intersection(*(near | (far - lost) for near, far, lost in has)), default=0)


@given(ranks())
@settings(max_examples=example_count(100), deadline=None)
def test_the_deepest_depth_that_all_have_is_decided(has):
    post = Post(len(has))
    crew = [Rank(session, *each) for session, each in zip(joined(post), has, strict=True)]
    for _ in range(20):
        for rank in crew:
            rank.step()
        post.deliver_all()
    assert {rank.depth for rank in crew} == {common(has)}
    assert all(common(has) in rank.promised for rank in crew)


@given(ranks(), st.data())
@settings(max_examples=example_count(150), deadline=None, suppress_health_check=[HealthCheck.data_too_large])
def test_whatever_is_lost_all_can_begin_at_the_leaders_depth(has, data):
    post = Post(len(has))
    crew = [Rank(session, *each) for session, each in zip(joined(post), has, strict=True)]
    leader, *others = crew
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["step", "step", "deliver", "deliver", "repeat", "lose", "die"])):
            case "step":
                number = data.draw(st.integers(0, len(crew) - 1))
                if number not in post.dead:
                    crew[number].step()
            case "die":
                post.dead.add(data.draw(st.integers(0, len(crew) - 1)))
            case action if post.mail:
                index = data.draw(st.integers(0, len(post.mail) - 1))
                if action == "repeat":
                    post.mail.append(post.mail[index])
                elif action == "lose":
                    post.mail.pop(index)
                else:
                    post.deliver(index)
    leader.step()
    leader.agreement.expire()  # its deadline
    assert leader.depth is not None
    if leader.depth:
        for rank in crew:
            assert leader.depth in rank.promised & (rank.near | {0})
    # Whoever is told by its engine can begin there, whatever it has heard itself.
    for rank in others:
        rank.step()
        assert rank.depth in (None, 0, leader.depth)
        rank.agreement.follow(leader.depth)
        assert rank.depth == leader.depth


def pair(**changes):
    post = Post(2)
    return post, joined(post, [facts(2, **changes)] * 2)


def run(post, *crew):
    for _ in range(6):
        for rank in crew:
            rank.step()
        post.deliver_all()


def test_nobody_waits_twice_for_a_silent_rank_and_it_is_welcome_when_it_speaks():
    post, (one, two) = pair()
    post.dead.add(1)
    leader = Rank(one, {3}, (), ())
    run(post, leader)
    assert leader.depth is None
    leader.agreement.expire()
    assert leader.agreement.decision == Decision(0, Reason.TIMEOUT)
    again = Rank(one, {3}, (), ())
    run(post, again)
    assert again.agreement.decision == Decision(0, Reason.UNAVAILABLE)
    post.dead.clear()
    slow = [Rank(two, {3}, (), ()) for _ in range(2)]
    run(post, *slow)
    assert [rank.depth for rank in slow] == [0, 0]
    third = [Rank(one, {3}, (), ()), Rank(two, {3}, (), ())]
    run(post, *third)
    assert [rank.depth for rank in third] == [3, 3]


def test_a_follower_whose_leader_is_silent_misses_at_once_until_it_speaks():
    post, (one, two) = pair()
    post.dead.add(0)
    waits = Rank(two, {3}, (), ())
    run(post, waits)
    waits.agreement.expire()
    assert waits.agreement.decision == Decision(0, Reason.TIMEOUT)
    misses = Rank(two, {3}, (), ())
    run(post, misses)
    assert misses.agreement.decision == Decision(0, Reason.UNAVAILABLE)
    post.dead.clear()
    first = Rank(one, {3}, (), ())
    first.step()
    first.agreement.expire()
    run(post, first, Rank(one, {3}, (), ()))
    for depth in (0, 3):  # the leader has to hear of the follower first
        both = [Rank(one, {3}, (), ()), Rank(two, {3}, (), ())]
        run(post, *both)
        assert [rank.depth for rank in both] == [depth, depth]


def test_a_load_that_failed_on_one_rank_is_voted_on_again_by_all():
    post, (one, two) = pair()
    crew = [Rank(one, {2, 3}, (), ()), Rank(two, {2, 3}, (), ())]
    run(post, *crew)
    crew[0].agreement.note_loaded()
    assert [rank.depth for rank in crew] == [3, 3]
    assert not crew[0].agreement.is_confirmed(crew[0].agreement.attempt)
    crew[1].near = {2}
    crew[1].agreement.fail_load()
    run(post, *crew)
    assert [rank.depth for rank in crew] == [2, 2]
    assert not crew[0].agreement.is_confirmed(crew[0].agreement.attempt)
    for rank in crew:
        rank.agreement.note_loaded()
    post.deliver_all()
    assert crew[0].agreement.is_confirmed(crew[0].agreement.attempt)
    for _ in range(4):  # what fails again and again ends without a restore
        crew[0].agreement.fail_load()
        run(post, *crew)
    assert [rank.depth for rank in crew] == [0, 0]


@pytest.mark.parametrize(
    "fields",
    [
        (MessageKind.DECIDED, LEADER, [0, 0, 5, "none", False]),
        (MessageKind.VOTE, LEADER, [0, 0, 0, b"\xff", 8, False]),
        (MessageKind.VOTE, 1, [float("inf"), 0, 0, b"", 0, False]),
        (MessageKind.VOTE, 2, [0, 0, 0, b"\xff", 8, False]),
        (MessageKind.HELLO, 1, [b"n", 2, 4, 1 << 40, {}, False]),
        (MessageKind.HELLO, 1, [b"n", 2, 4, b"n", {"kv": [0, 1, 1 << 40]}, False]),
        (MessageKind.HELLO, 1, [b"n", float("inf"), 4, b"n", {}, False]),
    ],
)
def test_a_message_that_no_rank_sends_changes_nothing_on_the_leader(fields):
    post, (one, two) = pair()
    crew = [Rank(one, {3}, (), ()), Rank(two, {3}, (), ())]
    crew[0].step()
    kind, sender, content = fields
    session = one._handshake.session  # private: the name of the session is in every message
    one.deliver(Message(kind, session, sender, content).pack())
    fresh = RankSession(post.groups[0], facts(2))
    fresh.deliver(Message(kind, session, sender, content).pack())
    post.groups[0].open(one.deliver)
    assert crew[0].depth is None
    run(post, *crew)
    assert [rank.depth for rank in crew] == [3, 3]


def test_nested_arrays_that_announce_gigabytes_are_no_message():
    bomb = b"\xdd\x00\x0f\x00\x00" * 200 + bytes(1 << 20)
    tracemalloc.start()
    with pytest.raises(WireError, match="no message"):
        unpack(bomb)
    assert tracemalloc.get_traced_memory()[1] < 8 << 20
    tracemalloc.stop()


def test_votes_on_numbers_far_ahead_leave_room_for_those_of_requests():
    post, (one, two) = pair()
    session = one._handshake.session  # private: the name of the session is in every message
    for number in range(2 * MAX_BALLOTS):
        fields = [MAX_BALLOTS + number, 0, 0, b"", 0, False]
        one.deliver(Message(MessageKind.VOTE, session, 1, fields).pack())
    crew = [Rank(two, {3}, (), ()), Rank(one, {3}, (), ())]
    crew[0].step()  # the follower votes first
    post.deliver_all()
    run(post, crew[1], crew[0])
    assert [rank.depth for rank in crew] == [3, 3]


def test_messages_of_an_earlier_round_attempt_or_session_change_nothing():
    post, (one, two) = pair()
    crew = [Rank(one, {2}, {3}, ()), Rank(two, {2, 3}, (), ())]
    for rank in crew:
        rank.step()
    vote = post.mail[0]
    post.deliver_all()
    crew[1].near = {2}
    crew[1].step()  # it has lost what it called ready
    post.mail.append(vote)
    post.deliver_all()
    crew[0].step()
    run(post, *crew)
    assert [rank.depth for rank in crew] == [2, 2]
    with pytest.raises(RankError, match="cannot begin at a depth of 3 pages, because it holds 2"):
        crew[1].agreement.follow(3)
    again = [Rank(one, {3}, (), ()), Rank(two, {3}, (), ())]
    again[1].step()
    post.deliver_all()
    again[0].step()
    decided = post.mail[0]
    post.deliver_all()
    again[1].agreement.fail_load()
    post.mail.append(decided)
    post.deliver_all()
    assert again[1].depth is None
    sessions = joined(post)
    later = [Rank(session, {3}, (), ()) for session in sessions]
    for _ in range(2):
        later[1].agreement = None
        later[1].step()
    post.mail.clear()
    post.mail.append(decided)
    post.deliver_all()
    assert later[1].depth is None


def test_a_request_that_one_rank_cannot_admit_begins_on_none():
    post, (one, two) = pair()
    waits = Rank(one, {3}, (), ())
    run(post, waits)
    two.begin().close()
    run(post, waits)
    assert waits.agreement.decision.is_refused
    one.begin().close()
    late = Rank(two, {3}, (), ())
    run(post, late)
    assert late.agreement.decision.is_refused


def test_ranks_that_were_refused_may_try_again_with_the_same_group_and_late_ones_hear_why():
    post = Post(3)
    wrong = [RankSession(post.groups[rank], facts(3, page_size=4 + rank)) for rank in (0, 1)]
    greet_once(post, wrong)
    with pytest.raises(RankError, match="rank 1 has pages of 5 tokens"):
        wrong[0].join(0.0)
    greet(post, wrong)
    with pytest.raises(RankError, match="rank 1 has pages of 5 tokens"):
        wrong[1].join(0.0)
    late = RankSession(post.groups[2], facts(3))
    greet(post, [late])
    with pytest.raises(RankError, match="rank 1 has pages of 5 tokens"):
        late.join(0.0)
    followers = [RankSession(post.groups[rank], facts(3)) for rank in (1, 2)]
    greet_once(post, followers)  # the leader's new session is not there yet
    sessions = [RankSession(post.groups[0], facts(3)), *followers]
    greet(post, sessions)
    for session in sessions:
        session.join(0.0)


def greet_once(post, sessions):
    for session in sessions:
        session.greet()
    post.deliver_all()


def refusal(*given):
    post = Post(len(given))
    sessions = [RankSession(group, one) for group, one in zip(post.groups, given, strict=True)]
    greet(post, sessions)
    with pytest.raises(RankError) as leader:
        sessions[0].join(0.1)
    for session in sessions[1:]:
        with pytest.raises(RankError) as other:
            session.join(0.1)
        assert str(other.value) == str(leader.value)
    return str(leader.value)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"page_size": 8}, "rank 1 has pages of 8 tokens"),
        ({"namespace": b"other"}, "rank 1 has another namespace"),
        ({"size": 3}, "rank 1 was made for 3 ranks"),
        ({"pools": {"kv": (Shard(), b"pages")}}, "rank 1 has the pools kv and"),
        (
            {"pools": {"kv": (Shard(), b"x"), "mamba": (Shard(), b"states")}},
            "ranks 0 and 1 hold the same part",
        ),
        ({"pools": {"kv": (Shard(1, 2), b""), "mamba": (Shard(), b"")}}, "pool kv has 2 shards on rank 1"),
    ],
)
def test_ranks_that_do_not_fit_together_all_say_why(changes, sentence):
    assert sentence in refusal(facts(2), facts(**{"size": 2} | changes))


def test_a_rank_outside_the_group_stops_all_and_a_size_that_differs_needs_no_full_group():
    post = Post(4)
    lone = RankSession(post.groups[3], facts(4))
    post.groups[0].size = 2
    leader = RankSession(post.groups[0], facts(2))
    greet(post, [leader, lone])
    for session in (leader, lone):
        with pytest.raises(RankError, match="rank 3 is outside the group of 2 that rank 0 knows"):
            session.join(0.0)
    post = Post(4)
    sessions = [RankSession(post.groups[0], facts(4)), RankSession(post.groups[1], facts(2))]
    greet(post, sessions)
    with pytest.raises(RankError, match="rank 1 was made for 2 ranks"):
        sessions[1].join(0.0)


def test_shards_that_the_ranks_cannot_hold_evenly_are_refused():
    def held(rank, size):
        return facts(4, pools={"kv": (Shard(rank, size), b"")})

    assert "cannot hold the 3 shards" in refusal(held(0, 3), held(1, 3), held(2, 3), held(0, 3))
    assert "by shard are 3, 1" in refusal(held(0, 2), held(0, 2), held(0, 2), held(1, 2))
    post = Post(4)  # grouped heads: two ranks hold each half
    sessions = joined(post, [held(0, 2), held(0, 2), held(1, 2), held(1, 2)])
    assert [session.writes for session in sessions] == [{"kv"}, set(), {"kv"}, set()]


def test_a_rank_that_does_not_come_is_named_and_one_that_comes_again_takes_its_place():
    post = Post(3)
    leader, first = (RankSession(post.groups[rank], facts(3)) for rank in (0, 1))
    first.greet(), post.deliver_all(), leader.greet()
    with pytest.raises(RankError, match=r"of the 3 ranks of this group, 2 did not answer within 0 s"):
        leader.join(0.0)
    with pytest.raises(RankError, match=r"of the 3 ranks of this group, 0 did not answer"):
        first.join(0.0)
    again = [RankSession(post.groups[rank], facts(3)) for rank in (1, 2)]
    greet(post, [leader, *again])
    for session in (leader, *again):
        session.join(0.0)
