"""How a case is run on a backend and compared: tensors, eager and captured forwards, expectations."""
