"""Reducing the gradients of a step at once, as NumPy arrays: what tapes and optimizers share."""
