"""Draft head for SmolLM2-135M-Instruct: files only. draftmark locates them through the package's entry point."""
