"""CPU kernels of modifiers and of what they remember."""
