"""Mutants that another process can load by name: plugins of their own, which import no part of the suite."""
