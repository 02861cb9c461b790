"""Stand-in for tests on a CPU: functions that build a draft tree from scores and verify it greedily."""

from __future__ import annotations

import torch

QLEN_ONLY = 1


def _links(parents: list[int], next_token, next_sibling) -> None:
    """Write the first child and next sibling of each node, in ascending order; nodes without a parent are skipped."""
    for node in range(len(parents) - 1, 0, -1):
        parent = parents[node]
        if parent < 0:
            continue
        if int(next_token[parent]) >= 0:
            next_sibling[node] = next_token[parent]
        next_token[parent] = node


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    seq_lens,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    nodes,
    mask_mode,
) -> None:
    """Build masks, positions and links. A selected score's index in `parent_list` gives the parent of its node."""
    assert mask_mode == QLEN_ONLY, "on a CPU SGLang requests masks of draft tokens only"
    batch = len(seq_lens)
    mask = tree_mask[: batch * nodes * nodes].view(batch, nodes, nodes)
    for r in range(batch):
        chosen, parents, levels = selected_index[r].tolist(), [-1], [0]
        for score in chosen:
            place = score // topk
            parents.append(0 if place == 0 else 1 + chosen.index(int(parent_list[r, place])))
            levels.append(levels[parents[-1]] + 1)
        mask[r] = False
        for node in range(nodes):
            seen = node
            while seen >= 0:
                mask[r, node, seen] = True
                seen = parents[seen]
        positions[r * nodes : (r + 1) * nodes] = seq_lens[r] + torch.tensor(levels)
        retrieve_index[r] = torch.arange(r * nodes, (r + 1) * nodes)
        _links(parents, retrieve_next_token[r], retrieve_next_sibling[r])


def reconstruct_indices_from_tree_mask(
    tree_mask, seq_lens, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling, batch, nodes
) -> None:
    """Compute positions and links from masks: a node's parent is the last of its ancestors."""
    mask = tree_mask.view(batch, nodes, nodes)
    retrieve_next_token.fill_(-1)
    retrieve_next_sibling.fill_(-1)
    for r in range(batch):
        before = [[j for j in range(node) if mask[r, node, j]] for node in range(nodes)]
        levels = torch.tensor([len(ancestors) for ancestors in before])
        positions[r * nodes : (r + 1) * nodes] = seq_lens[r] + levels
        retrieve_index[r] = torch.arange(r * nodes, (r + 1) * nodes)
        parents = [ancestors[-1] if ancestors else -1 for ancestors in before]
        _links(parents, retrieve_next_token[r], retrieve_next_sibling[r])


def verify_tree_greedy_cpu(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
) -> None:
    """Follow the tree from the root: accept the child that has the target's next token, until no child has it."""
    target = target_predict.flatten()
    for r in range(len(candidates)):
        last, node, count = int(retrive_index[r, 0]), 0, 0
        accept_index[r, 0] = last
        while count + 1 < accept_index.shape[1]:
            node = int(retrive_next_token[r, node])
            while node >= 0 and int(candidates[r, node]) != int(target[last]):
                node = int(retrive_next_sibling[r, node])
            if node < 0:
                break
            predicts[last] = target[last]
            last, count = int(retrive_index[r, node]), count + 1
            accept_index[r, count] = last
        accept_token_num[r] = count
        predicts[last] = target[last]
