"""vLLM with draftmark's backends beside its own: tokens a second, and texts. Needs vllm and draftmark-vllm."""
