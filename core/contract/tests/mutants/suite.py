"""Runs contract checks on a plugin in this process and reports the checks that fail."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import torch

from draftmark.loaded import LoadedBackend
from draftmark_contract.backend_under_test import BackendUnderTest
from draftmark_contract.check import Case, Check, ContractViolation, Refused, Tier, all_checks, spread

from .mutant import BY_CLASS, LAYOUTS, Mutant

ORDER = (
    *("load", "supports", "tightness", "overflow", "metadata", "padding", "purity", "numerics", "lengths", "guards"),
    *("sinks", "late", "memory", "repeats", "sizing", "graphs", "history", "proof"),
)
"""Modules of checks in the order in which they run: quick ones, and ones that fail often, first."""
SAMPLE = {
    **{"graphs": 4, "history": 6, "late": 2, "proof": 0, "memory": 999},
    **{"supports": 999, "load": 999, "sizing.covers_processors": 999},
}
"""Number of cases to sample, by check or module; 12 by default. A mutant that survives its sample runs all cases."""
FAR = ("V62", "Z11")
"""Mutants on which the check with a pool of 2**31 elements runs."""
HOOK_TIER = ("buffers", "layouts", "requirements", "supports", "usage", "describe")
"""Hooks that the sizing tier reads. Other mutants skip that tier, because it could not see their defect."""
OF_STATE = "state"
"""Beginning of the names of modules with checks of recurrent state."""
TREE_OPS = "tree_ops"
"""Name of the optional hook, and of the module with its checks."""

Failure = tuple[str, str, BaseException]


def original(layout: str) -> LoadedBackend:
    """Return the loaded correct backend of a metadata layout."""
    return LoadedBackend(LAYOUTS[layout].info.name, LAYOUTS[layout])


def checks_for(mutant: Mutant | None = None) -> list[Check]:
    """Return the checks that run code with the mutant's defect, quick checks first."""
    hooks = set(HOOK_TIER) if mutant is None or mutant.of_state else set(mutant.hooks or {}) & set(HOOK_TIER)
    wanted = [one for one in all_checks() if one.tier is Tier.HOST or (hooks and one.tier is Tier.SIZING)]
    # This check has a pool of 2**31 elements and is slow: a backend that gathers pages copies a gigabyte of them.
    wanted = [one for one in wanted if mutant is None or mutant.id in FAR or one.name != "numerics.reach_past_int32"]
    if mutant is not None:
        wanted = [one for one in wanted if _module(one).startswith(OF_STATE) == mutant.of_state]
        # Only the tree_ops checks call tree operations, and tree operations call no other hook.
        of_trees = set(mutant.hooks or {}) == {TREE_OPS}
        wanted = [one for one in wanted if (_module(one) == TREE_OPS) == of_trees]
    return sorted(wanted, key=lambda one: (ORDER.index(_module(one)) if _module(one) in ORDER else 99, one.name))


def failures(backend: LoadedBackend, checks: Iterable[Check] | None = None, sampled: bool = False) -> Iterator[Failure]:
    """Yield (check, case, error) of the first failing case of each check that fails."""
    for check in checks_for() if checks is None else checks:
        for case in _cases(check, sampled):
            error = outcome(backend, check, case)
            if error is not None:
                yield check.name, case.id, error
                break


def killing_case(backend: LoadedBackend, check: Check) -> Case | None:
    """Return the first failing case of the check, from its sample, then from all its cases."""
    cases = [*_cases(check, sampled=True), *_cases(check, sampled=False)]
    return next((case for case in cases if outcome(backend, check, case) is not None), None)


def first_failure(mutant: Mutant, layout: str) -> Failure | None:
    """Return the first (check, case, error) that kills a mutant. A sample of the cases runs first, then all cases."""
    for sampled in (True, False):
        found = next(failures(mutant.build(layout), checks_for(mutant), sampled), None)
        if found is not None:
            return found
    return None


def killed_by(mutant: Mutant, layout: str, most: int, known: Sequence[str] = ()) -> list[str]:
    """Return the names of at most `most` checks that kill a mutant.

    The `known` checks run first. If none of them fails, all checks run on a sample of their cases, then on all cases
    until one fails. Mutants of the later attacks (`BY_CLASS`) run only the known checks.
    """
    backend, every = mutant.build(layout), {one.name: one for one in checks_for()}
    first = (every[name] for name in known if name in every)
    found = list(islice((one.name for one in first if killing_case(backend, one) is not None), most))
    # Mutants of BY_CLASS subclass the tutorial's slow backend. `known` has the check for each, so skip the others.
    if found or mutant.id[0] in BY_CLASS:
        return found
    found = [name for name, _, _ in islice(failures(mutant.build(layout), checks_for(mutant), sampled=True), most)]
    one = None if found else first_failure(mutant, layout)
    return found if one is None else [one[0]]


def outcome(backend: LoadedBackend, check: Check, case: Case) -> BaseException | None:
    """Return the error of one item, or None if it passes or the backend refuses the case."""
    try:
        printed = io.StringIO()
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings(), contextlib.redirect_stdout(printed):
            warnings.simplefilter("ignore")
            check.run(BackendUnderTest(backend, "cpu", check.tier), case)
        if printed.getvalue():
            return ContractViolation("the backend printed", got=printed.getvalue()[:200])
    except Refused:
        return None
    except ContractViolation as violation:
        return violation
    except Exception as crash:  # a mutant can raise any error; `draftmark contract` also counts that as a failed item
        return crash
    return None


def _cases(check: Check, sampled: bool) -> list[Case]:
    cases = list(check.cases())
    if not sampled:
        return cases
    most = SAMPLE.get(check.name, SAMPLE.get(_module(check), 12))
    return list(spread(cases, most)) if most else []


def _module(check: Check) -> str:
    return check.name.partition(".")[0]
