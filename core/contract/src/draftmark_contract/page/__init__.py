"""HTML pages of verdicts. Each page is one file without scripts, network access, fonts or image files."""
