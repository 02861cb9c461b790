"""Draft trees and n-gram look-up."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark_speculative import DraftTree, Ngram

token = st.integers(0, 4)


def paths(tree):
    """Return every path from the root to a node, as token tuples without the root."""
    found = []
    for node in range(len(tree)):
        path, at = [], node
        while tree.parents[at] >= 0:
            path.append(tree.tokens[at])
            at = tree.parents[at]
        found.append(tuple(reversed(path)))
    return found


def test_insert_shares_prefixes_and_keeps_the_budget():
    """Two paths with a common prefix share nodes, and only new nodes count against the budget."""
    tree = DraftTree([9])
    assert tree.insert([1, 2, 3], 10) == 3
    assert tree.insert([1, 2, 4, 5], 1) == 1
    assert (tree.tokens, tree.parents) == ([9, 1, 2, 3, 4], [-1, 0, 1, 2, 2])


def test_the_longest_and_latest_match_is_continued():
    """The later of two equal matches is continued, and a longer match has priority over a later one."""
    assert Ngram(1, 4, 2, 1).begin(0, [1, 2, 7, 1, 2, 8, 1, 2]).propose().tokens == [2, 8, 1, 2]
    assert Ngram(1, 3, 3, 1).begin(0, [5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2]).propose().tokens == [2, 7, 6]


def test_branches_are_distinct():
    """With several branches, the tree has distinct continuations, best first, within the node limit."""
    tree = Ngram(2, 5, 2, 1).begin(0, [1, 2, 7, 7, 1, 2, 8, 8, 1, 2]).propose()
    assert tree.tokens == [2, 8, 8, 7, 7]
    assert tree.parents == [-1, 0, 1, 0, 3]


def test_a_repeating_text_is_continued_past_its_end():
    """A continuation that reaches the newest token goes on with the copied tokens, as in a periodic text."""
    assert Ngram(1, 6, 3, 1).begin(0, [1, 2, 1, 2, 1, 2]).propose().tokens == [2, 1, 2, 1, 2, 1]


def test_no_match_gives_only_the_root():
    """Without an earlier occurrence the tree has only the root."""
    assert Ngram(2, 8).begin(0, [1, 2, 3, 4]).propose().tokens == [4]


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.integers(1, 4), st.integers(1, 9), st.lists(token, min_size=1, max_size=40), st.lists(token, max_size=6))
def test_every_branch_starts_with_an_earlier_follower(topk, nodes, prompt, more):
    """Each branch starts with a token that followed an earlier copy of the newest token; trees keep their limits."""
    drafter = Ngram(topk, nodes, 3, 1).begin(0, prompt)
    drafter.extend(more)
    text = prompt + more
    tree = drafter.propose()
    assert tree.tokens[0] == text[-1]
    assert len(tree) <= nodes
    assert all(parent < node for node, parent in enumerate(tree.parents))
    assert sum(parent == 0 for parent in tree.parents) <= topk
    assert len(set(paths(tree))) == len(tree)
    for path in paths(tree):
        bigram = (text[-1], path[0]) if path else None
        assert bigram is None or bigram in set(pairwise(text)), (text, tree)
