"""Harnesses that run a case on a backend and compare the result: tensors, eager and captured forwards, expectations."""
