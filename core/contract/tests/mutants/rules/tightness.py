"""Mutants that the checks of `tightness` kill."""

from __future__ import annotations

from draftmark import maximum

from ..designs.layouts import CSR, SIZED_BY_CORE
from ..designs.workspaces import RIGHT, full, needs, own
from ..mutant import Mutant, resized

MUTANTS = (
    Mutant(
        "M25",
        "Multiplies the size of an index buffer by page_size",
        "tokenspeed#125",
        resized("kv_indices", lambda g, s: (s[0] * g.attention.page_size,)),
        layouts=CSR,
        absent="no page-indexed buffer; M25b enlarges the slot mapping",
    ),
    Mutant(
        "M25b",
        "Makes the slot mapping eight times too large",
        "aiter#3855",
        resized("slot_mapping", lambda g, s: (s[0] * 8,)),
    ),
    Mutant("W12", "Doubles the number of pages with overlap", "aiter#3855",
           resized("kv_indices", lambda g, s: (s[0] * 2,) if g.limits.overlap else s), layouts=CSR,
           absent=SIZED_BY_CORE),
    Mutant("W12b", "Doubles the number of rows for pages of one token", "tokenspeed#125",
           resized("slot_mapping", lambda g, s: (s[0] * 2,) if g.attention.page_size == 1 else s)),
    Mutant("W13", "Multiplies the VERIFY rows by topk", "aiter#3855",
           resized("slot_mapping", lambda g, s: (maximum(*s, g.max_reqs * g.draft.topk * g.draft.num_draft_tokens),))),
    Mutant("W20", "Sizes the workspace for 132 SMs", "pie#414", own(lambda g: 16 * 132 * g.max_rows_any, needs)),
    Mutant("W21", "Sizes the workspace three times too large", "flashinfer#2046", own(lambda g: 3 * full(g), needs)),
    Mutant("W22", "Leaves the workspace out of usage", "TRT-LLM#17026",
           {**RIGHT, "usage": lambda g, found, batch: found}),
    Mutant("W23", "Returns usage in elements instead of bytes",
           "TRT-LLM#17026", own(full, lambda g, x: needs(g, x) // 4)),
    Mutant("W24", "Returns the usage of an index buffer", "TRT-LLM#17026", own(full, needs, "slot_mapping")),
    Mutant("W25", "Reads device lengths in usage", "sglang#29413",
           own(full, lambda g, x: needs(g, x) + 0 * int(x.prefix_lens.max()))),
    Mutant("W26", "Returns 0 from usage", "TRT-LLM#17026", own(full, lambda g, x: 0)),
)  # fmt: skip
