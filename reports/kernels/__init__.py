"""What GPUs did while a model decoded: kernels per layer, from the traces of the servers' profilers."""
