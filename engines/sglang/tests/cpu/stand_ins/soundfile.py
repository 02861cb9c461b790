"""Stand-in for tests on a CPU: SGLang uses soundfile for speech only."""
