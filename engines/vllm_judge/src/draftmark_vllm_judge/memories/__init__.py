"""Stand-ins for the model runners of backends that keep KV outside of vLLM's pages, one module for each package."""
