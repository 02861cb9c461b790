"""What `make release` does: every distribution is built, looked at and installed, and nothing is uploaded."""
