"""A real training run that really hangs, on this machine, without a GPU."""
