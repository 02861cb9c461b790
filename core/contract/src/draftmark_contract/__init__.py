"""The contract suite: what a backend must do before it is trusted.

    pytest --pyargs draftmark_contract --attn-backend=NAME        (or: draftmark contract NAME)

Nothing to subclass. `checks/` holds the checks, one module per noun; `needs` says what a batch needs of every
buffer; `proof/` proves that the plugin's own sizing covers it; `verdict` counts, `report/` draws.
Importing this package imports neither torch nor pytest.
"""
