"""Host launch code: kernel arguments, TMA descriptors, the launcher and the relaunch cache."""
