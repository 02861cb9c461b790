"""The checks, one module per topic. `draftmark_contract.check.all_checks` imports them, which needs no torch."""
