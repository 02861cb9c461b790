"""Stand-in for tests on a CPU: SGLang imports it for speech alone."""
