from hypothesis import given
from hypothesis import strategies as st

from vertumnus.engine.zigzag import owner_of_last, share

degrees = st.sampled_from([1, 2, 4, 8, 16])


@given(num_tokens=st.integers(0, 300), degree=degrees)
def test_every_token_belongs_to_one_rank_and_ranks_differ_by_one_token_at_most(num_tokens, degree):
    shares = [share(num_tokens, degree, index) for index in range(degree)]
    taken = [token for s in shares for token in (*range(s[0], s[1]), *range(s[2], s[3]))]
    assert sorted(taken) == list(range(num_tokens))
    counts = [s.num_tokens for s in shares]
    assert max(counts) - min(counts) <= 1
    assert all(s.num_head or not s.num_tail for s in shares)


@given(num_tokens=st.integers(1, 300), degree=degrees)
def test_the_last_token_ends_its_owners_share(num_tokens, degree):
    owner = share(num_tokens, degree, owner_of_last(num_tokens, degree))
    assert num_tokens == (owner.tail_end if owner.num_tail else owner.head_end)


@given(chunk_tokens=st.integers(1, 40), degree=degrees.filter(lambda d: d > 1))
def test_with_equal_chunks_all_ranks_attend_to_the_same_number_of_pairs(chunk_tokens, degree):
    def pairs(start: int, end: int) -> int:
        return sum(range(start + 1, end + 1))

    shares = [share(2 * degree * chunk_tokens, degree, index) for index in range(degree)]
    assert len({pairs(s.head_start, s.head_end) + pairs(s.tail_start, s.tail_end) for s in shares}) == 1
