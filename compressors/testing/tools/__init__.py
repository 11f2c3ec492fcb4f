"""What checks are written with: examples, inputs, a simulated engine, another process."""
