"""Check of the host's lengths after an n-gram verify step: `seq_lens_sum` must equal the sum of `seq_lens`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from draftmark_contract.check import ContractViolation

from .bare import bare, member

LENGTHS, ACCEPTED = (20, 7, 31), (3, 0, 2)


def check() -> None:
    """Accept some draft tokens, then check that `seq_lens_sum` equals the sum of `seq_lens`.

    SGLang sizes the index buffer of the next forward by `seq_lens_sum`.

    Raises:
        ContractViolation: the sums differ.
    """
    kind = member("srt.speculative.ngram_info", "NgramVerifyInput")
    if not hasattr(kind, "verify"):
        from draftmark_contract.check import Unjudged

        raise Unjudged("this release has no NgramVerifyInput.verify; its worker advances lengths elsewhere")
    batch = _batch()
    made = bare(
        kind,
        retrieve_index=torch.zeros(len(LENGTHS), 4, dtype=torch.int64),
        draft_token_num=4,
        num_correct_drafts=torch.tensor(ACCEPTED, dtype=torch.int32),
        accept_tokens=torch.zeros(0, dtype=torch.int64),
        # Only lengths are judged, so SGLang's verify kernel and its updates of output tokens and slots do nothing here.
        _greedy_verify=lambda batch, logits: None,
        _fill_requests=lambda batch, logits: None,
        _free_cache=lambda *given: None,
    )
    made.verify(batch, SimpleNamespace(next_token_logits=None), 1)
    total, kept = int(batch.seq_lens.sum()), batch.seq_lens_sum
    if total != kept:
        raise ContractViolation(
            f"seq_lens_sum is not updated, so the next forward's kv_indices are short by {total - kept} entries",
            batch=f"n-gram verify: lengths {list(LENGTHS)}, accepted {[n + 1 for n in ACCEPTED]} tokens",
            got=kept,
            expected=f"{total}, the sum of seq_lens {batch.seq_lens.tolist()}",
            bug="sglang#26753",
        )


def _batch() -> Any:
    sampling = _Sampling()
    return SimpleNamespace(
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int64),
        seq_lens_cpu=torch.tensor(LENGTHS, dtype=torch.int64),
        seq_lens_sum=sum(LENGTHS),
        sampling_info=sampling,
    )


class _Sampling:
    """Stands in for SGLang's sampling information: greedy sampling without penalties."""

    has_custom_logit_processor, logit_bias, is_all_greedy = False, None, True
    penalizer_orchestrator = SimpleNamespace(is_required=False)

    def __len__(self) -> int:
        return len(LENGTHS)
