"""What adapters do alike, without any framework: requests, options, NumPy gradients."""
