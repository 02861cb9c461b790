"""Benchmark of vLLM with draftmark's backends and with its own: tokens/s and texts. Needs vllm and draftmark-vllm."""
