"""Torch tensors as arrays of the engine's: in host memory, on a GPU, and as trees."""
