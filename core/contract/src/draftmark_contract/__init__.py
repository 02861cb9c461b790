"""The contract suite: tests that an attention backend must pass before an engine can trust it.

    draftmark contract NAME

A plugin subclasses nothing. `checks/` contains one module of checks per topic. `sizing/` computes the entries that a
batch needs of every buffer; the distribution draftmark-proof proves that the plugin's own sizing covers them. `runner/`
runs the checks and reports the verdict. Importing this package imports neither torch nor pytest.
"""
