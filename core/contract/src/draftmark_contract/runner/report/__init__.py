"""The report: one self-contained HTML page per run, without network, script or font."""
