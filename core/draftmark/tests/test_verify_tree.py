"""Draft trees and their verification, compared with brute force in plain Python."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftmark.tree import ancestors, depths, pack_bits, verify_tree


@st.composite
def trees(draw, max_nodes=40):
    """Draw the parents of a random tree: parents have lower indices than children, the root has parent -1."""
    nodes = draw(st.integers(1, max_nodes))
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, nodes)]


def line_of(parents, node):
    """Return a node and its ancestors."""
    line = {node}
    while parents[node] >= 0:
        node = parents[node]
        line.add(node)
    return line


@settings(derandomize=True, deadline=None, max_examples=200)
@given(trees())
def test_ancestors_and_depths(parents):
    """Ancestors by matrix squaring equal those found by following parents one by one."""
    reach = ancestors(torch.tensor([parents]))
    want = [[other in line_of(parents, node) for other in range(len(parents))] for node in range(len(parents))]
    assert reach[0].tolist() == want
    assert depths(reach)[0].tolist() == [len(line_of(parents, node)) - 1 for node in range(len(parents))]


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.lists(st.booleans(), min_size=1, max_size=70), st.integers(0, 2))
def test_pack_bits(bits, spare):
    """Bit j is bit j % 32 of word j // 32, sign bit included, and unused bits are zero."""
    words = -(-len(bits) // 32) + spare
    packed = pack_bits(torch.tensor([bits]), words)
    assert packed.dtype == torch.int32 and packed.shape == (1, words)
    value = sum((word & 0xFFFFFFFF) << (32 * i) for i, word in enumerate(packed[0].tolist()))
    assert value == sum(bit << j for j, bit in enumerate(bits))


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.data())
def test_verify_tree_accepts_the_path_of_the_target(data):
    """From the root, a child is accepted while it matches the target's token; unused nodes never match."""
    requests, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 9))
    rows = st.lists(st.integers(0, 2), min_size=nodes, max_size=nodes)
    parents, drafts, targets = [], [], data.draw(st.lists(rows, min_size=requests, max_size=requests))
    for _ in range(requests):
        line = [-1] + [data.draw(st.integers(0, node - 1)) for node in range(1, nodes)]
        tokens = data.draw(st.lists(st.integers(-1, 2), min_size=nodes, max_size=nodes))
        seen = set()
        for node in range(1, nodes):  # make sibling tokens distinct: DraftTree never has equal siblings
            if (line[node], tokens[node]) in seen:
                tokens[node] = -1
            seen.add((line[node], tokens[node]))
        parents.append(line)
        drafts.append(tokens)
    verdict = verify_tree(torch.tensor(drafts), torch.tensor(parents), torch.tensor(targets))
    for r in range(requests):
        node, path = 0, [0]
        while True:
            child = [n for n in range(1, nodes) if parents[r][n] == node and drafts[r][n] == targets[r][node] != -1]
            if not child:
                break
            node = child[0]
            path.append(node)
        kept = len(path)
        assert verdict.accept_lens[r] == kept
        assert verdict.tokens[r].tolist() == [targets[r][n] for n in path] + [-1] * (nodes - kept)
        assert verdict.accept_index[r].tolist() == path + list(range(kept, nodes))
