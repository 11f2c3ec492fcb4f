"""Which tensors travel together, in pieces or whole, and by which collective."""
