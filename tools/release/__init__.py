"""Steps of `make release`: build, check and install every distribution. Nothing is uploaded."""
