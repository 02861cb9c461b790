"""Systematic mutants: every small change of a backend's own source, judged by the contract suite.

    python -m tools.mutation --backend reference --workers 2

The mutants in the package `mutants` are hand-made defects. Here a program makes them by rule, so a survivor shows a
case that no author thought of. Modules, in the order of the work:

* `sites` finds the places of a source that can change, `operators` the changes, and `mutation` lists all mutants.
* `copies` imports a changed copy of the package in memory.
* `baseline` records the statements that each item reaches.
* `judge` runs items on one mutant in a process of its own; `pool` runs many such processes.
* `review` reads the hand-made reviews of survivors; `page` keeps results.json and writes the page.

mutmut drives only pytest, and cosmic-ray starts a process for each mutant and writes the mutant over the source.
Importing torch and drawing the cases anew would cost more than judging most mutants, so this package does neither.
"""
