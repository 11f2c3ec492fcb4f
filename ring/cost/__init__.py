"""What collectives cost: a model, and the measurement of a network that feeds it."""
