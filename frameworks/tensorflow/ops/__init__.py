"""Collectives on TensorFlow's tensors, eager and as graph nodes, and their errors."""
