"""Rows are the same wherever they are found: young in the dictionary, old in the hash table, short or long chains."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize
from tests.core.index.test_reports_against_naive import ReportStreams

from vertumnus.core.index.nodes import HASH_BYTES, ROOT, NodeTable


class ReportStreamsWithOldRows(ReportStreams):
    """The same streams of reports, on an index that moves rows to the hash table all the time."""

    @initialize()
    def start(self) -> None:
        super().start()
        self.index._trie.nodes.max_young = 4


TestReportStreamsWithOldRows = ReportStreamsWithOldRows.TestCase
TestReportStreamsWithOldRows.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)


def blocks_of(name: int, num_blocks: int) -> tuple[bytes, ...]:
    return tuple((name * 1000 + position + 1).to_bytes(8, "little") * 2 for position in range(num_blocks))


@given(
    chains=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 90), st.integers(0, 60)), min_size=1, max_size=12),
    max_young=st.sampled_from([1, 30, 1000]),
)
@settings(max_examples=60, deadline=None)
def test_chains_that_come_and_go_are_found_as_long_as_they_live(
    chains: list[tuple[int, int, int]], max_young: int
) -> None:
    nodes = NodeTable(num_degrees=1, capacity=4)
    nodes.max_young = max_young
    length = dict.fromkeys(range(6), 0)
    for name, num_blocks, num_buried in chains:
        path = nodes.walk(blocks_of(name, num_blocks))
        assert len(path) == min(length[name], num_blocks)
        if num_blocks > len(path):
            above = path[-1] if path else ROOT
            path.extend(nodes.append_chain(above, blocks_of(name, num_blocks)[len(path) :]))
            length[name] = num_blocks
        assert nodes.find_all(blocks_of(name, num_blocks)) == path.tolist()
        for row in path:
            nodes.holder_set.cells[row] = 1
        left = max(length[name] - num_buried, 0)
        rows = nodes.find_all(blocks_of(name, length[name])[left:][::-1])
        for row in rows:
            nodes.holder_set.cells[row] = 0
        nodes.bury(rows, {})
        length[name] = left
        nodes.check_invariants()
    for name, num_blocks in length.items():
        rows = [nodes.find(block) for block in blocks_of(name, 91)]
        assert rows == nodes.walk(iter(blocks_of(name, 91))).tolist() + [ROOT] * (91 - num_blocks)
        for known in (num_blocks, num_blocks // 2, 91):  # a list is compared as a whole first
            at_once = nodes.walk(list(blocks_of(name, known)))
            assert at_once == nodes.walk(iter(blocks_of(name, known)))
            below = nodes.walk(list(blocks_of(name, known)[1:]), rows[0])
            assert below == at_once[1:]


@given(head=st.integers(0, 30), tail=st.integers(0, 30), max_young=st.sampled_from([1, 1000]))
@settings(max_examples=30, deadline=None)
def test_a_chain_ends_before_a_block_that_is_known_or_repeated_or_no_block(
    head: int, tail: int, max_young: int
) -> None:
    known, chain = blocks_of(1, 2), blocks_of(2, head + tail)
    for stop in (known[0], known[1], bytes(HASH_BYTES), *chain[:head][:1]):
        nodes = NodeTable(num_degrees=1, capacity=4)
        nodes.max_young = max_young
        nodes.append_chain(ROOT, known)
        made = nodes.append_chain(ROOT, (*chain[:head], stop, *chain[head:]))
        assert made == list(range(3, head + 3))
        assert nodes.find_all(chain[head:]) == [ROOT] * tail
        assert nodes.find_all(known) == [1, 2]
        nodes.check_invariants()
