"""Systematic mutants: every small change of a backend's own source, judged by the contract suite.

    python -m core.contract.tests.source_mutants --backend reference --workers 2

Beside `mutants`, whose defects somebody thought of, these are made by rule, so that what survives tells what nobody
thought of. In the order of the work: `sites` says where a source is changed, `operators` how, `mutation` makes the
list; `copies` imports a changed copy of the package in memory, `baseline` learns which items reach which statement,
`judge` shows one mutant to the items in a process of its own, `pool` runs many; `review` holds the hand-made verdicts
on survivors, `page` keeps results.json and writes the page.

Why not mutmut or cosmic-ray: the one drives pytest alone and the other starts a process for each mutant and writes it
over the source; importing torch and drawing the cases would cost more than judging most mutants does.
"""
