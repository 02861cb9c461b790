"""A process that runs a backend as an engine does, without any module of the suite."""
