"""Cases of other shapes: a fixed subset that every run measures, and a grid that takes several runs.

Ranges of the grid:

* Attention shapes that engines serve (`models.MODELS`).
* Pages of 16 (vLLM's default), 32, 64 and 128 tokens.
* Contexts of a chat (256 to 2048), of documents (8192, 32768), and the longest usual one (131072).
* Batches that one GPU or one of 8 ranks holds.
* Decode, draft steps, trees of 4 to 256 nodes, chains of 5 rows (EAGLE) and of 1 to 5 rows (n-gram).
* Prefill, and chunks after a context, as in the next turn of a conversation.
* Windows, soft caps and sinks of real models.

The grid varies one or two factors from Llama-3-8B, and leaves out cases that do not fit 141 GB.
"""

from __future__ import annotations

import re
from dataclasses import replace

import torch

from .cases import Case, ragged_lens
from .models import MODELS, PACKED, STANDARD, Model

Q7, Q5, G8, G12, D64, D96, D256, RANK = (
    Model(28, 4, 128, 16), Model(40, 8, 128, 16), Model(64, 8, 128), Model(48, 4, 128, 16), Model(64, 8, 64),
    Model(24, 8, 96, 16), Model(16, 4, 256), Model(8, 1, 128, 16),
)  # fmt: skip
GPT_OSS, GEMMA_2, GEMMA_3, CAPPED = (
    Model(64, 8, 64, 16, window=128, sinks=True), Model(32, 16, 128, 16, window=4096, cap=50.0),
    Model(32, 16, 128, 16, window=1024), Model(16, 8, 256, 16, cap=50.0),
)  # fmt: skip
PAGES = (16, 32, 64, 128)
"""Page sizes in tokens: vLLM's default, and sizes that other engines use."""
MOST_BYTES = 40 << 30
"""Largest KV of a case in bytes: several sets and the reference must fit one GPU."""


def case(model: Model, kind: str, lens: tuple[int, ...], rows: int, lengths: str = "") -> Case:
    """Return a case of one kind. Its name contains the shape unless it is the standard one."""
    lengths = lengths or f"{len(lens)}x{lens[0]}"
    number = "" if kind in ("decode", "extend") else str(rows)
    own = "" if model == STANDARD else f"@{model.shape}-p{model.page}{model.kind}"
    name = f"{kind}{number}-{lengths}{own}"
    if kind == "decode":
        return Case(name, lens, 1, 1, model=model)
    if kind == "extend":
        return Case(name, (0,) * len(lens), lens[0], lens[0], ragged=True, model=model)
    if kind in ("chain", "uneven", "chunk", "chunks"):
        own = _uneven(len(lens), rows) if kind in ("uneven", "chunks") else ()
        return Case(name, lens, rows, rows, ragged=kind.startswith("chunk"), model=model, uneven=own)
    return Case(name, lens, rows, 2 * rows if kind == "draft" else rows, tree=True, model=model)


NAME = re.compile(
    r"(?P<kind>decode|draft|verify|chain|uneven|extend|chunks?)(?P<rows>\d*)"
    r"-(?P<count>[1-9]\d*)x(?P<ragged>ragged)?(?P<length>\d*)"
    r"(?:@(?P<heads>\d+)/(?P<kv_heads>\d+)x(?P<dim>\d+)-p(?P<page>\d+)(?P<narrow>-e4m3)?(?P<rounded>-rounded)?"
    r"(?:-w(?P<window>[1-9]\d*))?(?:-cap(?P<cap>[1-9]\d*(?:\.\d+)?))?(?P<sinks>-sinks)?"
    rf"(?:-(?P<packed>{'|'.join(PACKED)}))?)?"
)
MOST_RAGGED = 8192
"""Longest request of a case with ragged lengths, in tokens, if its name gives none."""


def named(name: str) -> Case:
    """Return the case of a name, in the grid or not: ``verify16-64x8192@32/8x160-p16-e4m3-w4096-cap50-sinks``.

    Raises:
        ValueError: the name is not a case's name.
    """
    parts = NAME.fullmatch(name)
    counted = parts is not None and (parts["kind"] in ("decode", "extend")) != bool(parts["rows"])
    one_length = parts is not None and not (parts["kind"] == "extend" and parts["ragged"])
    written = parts is not None and bool(parts["ragged"] or parts["length"])
    if parts is None or not counted or not one_length or not written or (parts["rounded"] and not parts["narrow"]):
        raise ValueError(
            f"{name!r} is not a case's name; write KIND, ROWS, -REQUESTSxLENGTH, @HEADS/KV_HEADSxDIM-pPAGE, as in "
            "verify16-64x8192@32/8x160-p16 or decode-8xragged4096; -e4m3, -e4m3-rounded, -wWINDOW, -capCAP, -sinks, "
            "-tokens or -heads (K and V in one page) may follow; "
            "kinds are decode and extend (of one length), which have no ROWS, and draft, verify, chain, uneven, chunk, "
            "chunks"
        )
    model = STANDARD
    if parts["heads"]:
        model = Model(*(int(parts[part]) for part in ("heads", "kv_heads", "dim", "page")))
    model = replace(
        model,
        window=int(parts["window"] or 0),
        cap=float(parts["cap"] or 0),
        sinks=parts["sinks"] is not None,
        packed=parts["packed"] or "",
    )
    model = model.narrow(parts["rounded"] is not None) if parts["narrow"] else model
    count, length = int(parts["count"]), int(parts["length"] or MOST_RAGGED)
    lengths = name.split("@")[0].partition("-")[2]
    lens = ragged_lens(count, length) if parts["ragged"] else (length,) * count
    return case(model, parts["kind"], lens, int(parts["rows"] or 1), lengths)


def _uneven(count: int, most: int) -> tuple[int, ...]:
    """Return `count` fixed pseudo-random numbers of rows (1 to `most`), as n-gram drafts produce per request."""
    generator = torch.Generator().manual_seed(11)
    return tuple(torch.randint(1, most + 1, (count,), generator=generator).tolist())


def four(model: Model) -> tuple[Case, ...]:
    """Return four cases of one model shape: decode, a small tree, a large tree, and prefill."""
    return (
        case(model, "decode", (8192,) * 64, 1),
        case(model, "verify", (8192,) * 64, 16),
        case(model, "verify", (8192,) * 16, 64),
        case(model, "extend", (4096,) * 8, 1),
    )


SUBSET = (
    case(STANDARD, "decode", (1024,), 1),
    case(STANDARD, "verify", (1024,), 16),
    case(STANDARD, "decode", (1024,) * 64, 1),
    case(STANDARD, "verify", (1024,) * 64, 4),
    case(STANDARD, "verify", (1024,) * 64, 16),
    case(STANDARD, "verify", (8192,), 128),
    case(STANDARD, "verify", (8192,) * 8, 256),
    *four(STANDARD.paged(16)),
    case(STANDARD.paged(16), "verify", (32768,), 64),
    *four(Q7),
    *four(Q5),
    *four(G8),
    *four(D64),
    *four(D256),
    *four(STANDARD.narrow()),
    case(STANDARD.narrow(), "draft", (8192,) * 64, 8),
    *four(STANDARD.paged(16).narrow()),
    case(STANDARD.paged(16).narrow(), "chunk", (32768,), 2048),
    case(STANDARD.paged(16), "chain", (1024,) * 64, 5),
    case(STANDARD.paged(16), "chain", (32768,) * 8, 5),
    case(STANDARD, "chain", (32768,) * 8, 5),
    case(STANDARD.paged(16), "uneven", (1024,) * 16, 5),
    case(STANDARD.paged(16), "uneven", (1024,) * 64, 5),
    case(STANDARD.paged(16), "uneven", (8192,) * 64, 5),
    case(STANDARD.paged(16), "chunk", (4096,), 16),
    case(STANDARD.paged(16), "chunk", (32768,), 64),
    case(STANDARD.paged(16), "chunk", (8192,), 256),
    case(STANDARD.paged(16), "chunk", (8192,), 768),
    case(STANDARD.paged(16), "chunk", (32768,), 2048),
    case(STANDARD.paged(16), "chunk", (8192,) * 8, 64),
    case(STANDARD.paged(16), "chunk", (8192,) * 17, 32),
    case(STANDARD.paged(16), "chunks", ragged_lens(8, 16384), 100, "8xragged16384"),
    case(Q7, "chunk", (32768,), 64),
    case(Q7, "chunks", ragged_lens(8, 16384), 100, "8xragged16384"),
    case(D64, "chunk", (8192,), 64),
    case(D96, "chunk", (32768,), 512),
    case(D96, "chunk", (4096,) * 8, 256),
    case(G12.narrow(), "chain", (8192,) * 32, 8),
    case(Q5.narrow(), "verify", (8192,) * 16, 32),
    case(D256, "chunk", (8192,), 64),
    case(RANK, "chunk", (8192,) * 8, 64),
    case(RANK, "chunks", ragged_lens(8, 16384), 100, "8xragged16384"),
    *four(GPT_OSS),
    case(GPT_OSS, "decode", (8192,), 1),
    case(GPT_OSS, "chain", (8192,) * 64, 5),
    case(GPT_OSS, "chunk", (8192,), 256),
    *four(GEMMA_2),
    case(GEMMA_2, "chunk", (8192,), 256),
    *four(GEMMA_3),
    *four(CAPPED),
)


def grid() -> tuple[Case, ...]:
    """Return every case of the grid once, also the cases of the fixed subset."""
    found: dict[str, Case] = {one.name: one for one in SUBSET}
    for model in MODELS.values():
        for page in PAGES:
            for one in four(model.paged(page)):
                found.setdefault(one.name, one)
        for one in four(model.paged(16).narrow()):
            found.setdefault(one.name, one)
    for page in (16, 64):
        model = STANDARD.paged(page)
        for length in (256, 1024, 2048, 8192, 32768, 131072):
            for requests in (1, 8, 64, 256):
                lens = (length,) * requests
                found |= {one.name: one for one in _trees(model, lens)}
        ragged = ragged_lens(64, 8192)
        for one in (case(model, "decode", ragged, 1, "64xragged"), case(model, "verify", ragged, 16, "64xragged")):
            found.setdefault(one.name, one)
    return tuple(one for one in found.values() if one.held_bytes <= MOST_BYTES)


def _trees(model: Model, lens: tuple[int, ...]) -> list[Case]:
    sizes = (4, 8, 16, 32, 64, 128, 256) if len(lens) < 256 else (4, 16)
    return [
        case(model, "decode", lens, 1),
        *(case(model, "draft", lens, width) for width in (4, 8, 16)),
        *(case(model, "verify", lens, size) for size in sizes),
        *(case(model, kind, lens, 5) for kind in ("chain", "uneven")[: len(lens)]),
    ]
