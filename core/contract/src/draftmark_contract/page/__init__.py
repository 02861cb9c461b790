"""HTML pages of verdicts: one self-contained file without script, network access, fonts or image files."""
