"""From tensors to a launch: arguments, copy descriptors, the launcher and the relaunch cache."""
