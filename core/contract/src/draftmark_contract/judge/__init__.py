"""Runs the contract's rules on the attention backends of an engine: `draftmark judge ENGINE:TARGET`.

`target` declares what an engine must provide. `driver` runs one step of a backend. `questions` builds the items.
"""
