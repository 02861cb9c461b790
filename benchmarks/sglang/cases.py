"""What is measured: one server a row of `SERVERS`, each at several points (requests together, tokens before decoding).

With dummy weights nothing is worth accepting, so SGLang is told how much a verification commits
(`SGLANG_SIMULATE_ACC_LEN`, which it reads for chains and trees alike): the same number of every backend, so that rows
differ by what attention costs and not by which tokens were guessed.
"""

from __future__ import annotations

from dataclasses import dataclass

POINTS = ((1, 1024), (64, 1024), (8, 8192), (16, 1024), (1, 32768))
LONG = (*POINTS, (1, 8192), (64, 8192))
FEW = ((1, 1024), (64, 1024))
PREFILLS = ((1, 1024), (16, 1024), (1, 32768))
"""Prompts that are prefilled in earnest, where prefill is measured."""


@dataclass(frozen=True)
class Case:
    """How a server speculates and at which page size.

    Attributes:
        speculate: none, ngram, chain or tree.
        topk, num_steps, num_draft_tokens: of chain and tree.
        accept: tokens that a verification is told to commit.
    """

    speculate: str
    page_size: int
    topk: int = 1
    num_steps: int = 1
    num_draft_tokens: int = 1
    accept: int = 1

    @property
    def name(self) -> str:
        """How rows call it."""
        if self.speculate == "ngram":
            return f"ngram({self.num_draft_tokens})"
        shape = "" if self.topk == 1 else f"({self.topk},{self.num_steps},{self.num_draft_tokens})"
        return f"{self.speculate}{shape}"

    @property
    def reserved(self) -> int:
        """Tokens for which SGLang keeps pages free behind a request's text: twice a round's."""
        if self.speculate == "none":
            return self.page_size
        return 2 * max(self.topk * self._of_a_branch, self.num_draft_tokens) + 2 * self.page_size

    @property
    def _of_a_branch(self) -> int:
        """Slots that SGLang gives each branch: its steps, or, where branches begin in copies of a page, whole pages."""
        if self.page_size == 1 or self.topk == 1:
            return self.num_steps
        return (self.page_size - 1 + self.num_steps + self.page_size - 1) // self.page_size * self.page_size


@dataclass(frozen=True)
class Server:
    """One process: a case, an attention backend by SGLang's name, and what is measured of it.

    Attributes:
        prefill: whether prefill is measured too.
        profiled: at how many of the points kernels are listed too.
    """

    case: Case
    backend: str
    points: tuple[tuple[int, int], ...] = POINTS
    prefill: bool = False
    profiled: int = 0

    @property
    def name(self) -> str:
        """How the record calls what is missing."""
        return f"{self.backend} {self.case.name} page {self.case.page_size}"

    @property
    def tokens(self) -> int:
        """KV slots: the largest point, with what is decoded and reserved, and a little."""
        most = max(requests * (length + NEW + self.case.reserved) for requests, length in self.points)
        return int(most * 1.04) // 64 * 64


NEW = 192
"""Tokens decoded at a point of many requests, at most."""


def plain(page_size: int) -> Case:
    """Without drafts."""
    return Case("none", page_size)


def chain(page_size: int) -> Case:
    """Three drafts in a row."""
    return Case("chain", page_size, 1, 3, 4, 3)


def tree(page_size: int, topk: int, num_steps: int, num_draft_tokens: int, accept: int) -> Case:
    """A tree of an EAGLE head."""
    return Case("tree", page_size, topk, num_steps, num_draft_tokens, accept)


def tree16(page_size: int) -> Case:
    """The small tree."""
    return tree(page_size, 4, 4, 16, 4)


def tree32(page_size: int) -> Case:
    """The middle one."""
    return tree(page_size, 8, 4, 32, 4)


def tree48(page_size: int) -> Case:
    """The large one."""
    return tree(page_size, 8, 6, 48, 5)


def ngram(page_size: int) -> Case:
    """Sixteen nodes that were seen in the text before."""
    return Case("ngram", page_size, num_draft_tokens=16, accept=3)


ALL = len(POINTS)
WAVES = (
    (
        Server(plain(64), "draftmark", LONG, prefill=True, profiled=ALL),
        Server(plain(64), "fa3", LONG, prefill=True, profiled=4),
        Server(tree32(1), "draftmark", profiled=ALL),
        Server(tree32(1), "fa3", profiled=1),
        Server(chain(64), "draftmark", LONG, profiled=ALL),
        Server(chain(64), "fa3", LONG, profiled=1),
        Server(tree16(1), "draftmark", profiled=ALL),
        Server(tree16(1), "fa3"),
        Server(tree48(1), "draftmark", profiled=ALL),
        Server(tree48(1), "fa3"),
    ),
    (
        Server(tree32(64), "draftmark", profiled=ALL),
        Server(tree32(64), "fa3", profiled=1),
        Server(tree16(64), "draftmark", profiled=2),
        Server(tree16(64), "fa3"),
        Server(tree48(64), "draftmark"),
        Server(tree48(64), "fa3"),
        Server(ngram(1), "draftmark", profiled=ALL),
        Server(ngram(1), "fa3"),
        Server(ngram(64), "draftmark"),
        Server(plain(1), "draftmark", FEW),
        Server(plain(1), "fa3", FEW),
        Server(chain(1), "draftmark", FEW),
        Server(chain(1), "fa3", FEW),
    ),
    (
        Server(tree32(16), "draftmark"),
        Server(tree32(16), "fa3"),
        Server(tree16(16), "draftmark"),
        Server(tree16(16), "fa3"),
        Server(tree48(16), "draftmark"),
        Server(tree48(16), "fa3"),
        Server(ngram(16), "draftmark"),
        Server(plain(16), "draftmark", FEW),
        Server(plain(16), "fa3", FEW),
        Server(chain(16), "draftmark", FEW),
        Server(plain(64), "triton", LONG, prefill=True),
        Server(tree32(1), "triton"),
        Server(tree48(1), "triton"),
    ),
    (
        Server(plain(64), "flashinfer", LONG, prefill=True),
        Server(tree32(1), "flashinfer", profiled=1),
        Server(tree16(1), "flashinfer"),
        Server(tree48(1), "flashinfer"),
        Server(ngram(1), "flashinfer"),
        Server(chain(64), "flashinfer", LONG),
        Server(ngram(64), "flashinfer"),
        Server(tree16(64), "flashinfer"),
        Server(tree32(16), "flashinfer"),
        Server(tree48(64), "flashinfer"),
    ),
    (
        Server(chain(64), "triton", LONG),
        Server(tree16(1), "triton"),
        Server(ngram(1), "triton"),
        Server(tree48(64), "triton"),
        Server(tree16(64), "triton"),
    ),
)
"""Servers that fit into one GPU together start together, and are measured one after the other; what tells most comes
first, should time run out. Beside the first wave the servers of `texts` start, so it is smaller. FlashInfer, which
compiles its kernels for minutes, has a wave of its own."""
SERVERS = tuple(server for wave in WAVES for server in wave)
