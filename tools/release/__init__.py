"""Steps of `make release`: build, check and install every distribution. They upload nothing."""
