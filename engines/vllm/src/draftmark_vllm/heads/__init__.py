"""draftmark's draft heads as EAGLE-3 drafters of vLLM: `convert` writes one as a folder that vLLM loads."""
