"""`parts_at_ties`: texts may part where rounding decides, and nowhere else."""

from __future__ import annotations

from draftmark_speculative.models.tiny import parts_at_ties, tiny_hf_model


def test_only_tokens_within_the_rounding_error_are_excused():
    """The second place of each text is one row's choice of the same model in bfloat16."""
    rounded, exact = tiny_hf_model("llama", dtype="bfloat16"), tiny_hf_model("llama")
    prompts = [[first, first + 1] for first in range(0, 40, 2)]
    seen = set()
    for prompt in prompts:
        ids = exact.dummy_inputs["input_ids"].new_tensor([prompt])
        wanted, got = (one(ids).logits[0, -1].detach().float() for one in (exact, rounded))
        order, bound = wanted.argsort(descending=True).tolist(), 2 * (wanted - got).abs().max()
        for rank in (1, 20):
            tie = bool(wanted[order[0]] - wanted[order[rank]] < bound)
            seen.add(tie)
            assert parts_at_ties(rounded, exact, [prompt], [[order[0], 5]], [[order[rank], 6]]) is tie
    assert seen == {True, False}


def test_equal_texts_part_nowhere():
    """And a model is not asked."""
    assert parts_at_ties(None, None, [[1]], [[2, 3]], [[2, 3]])
