"""The checks, one module per noun. `draftmark_contract.check.all_checks` finds them; none imports torch at the top."""
