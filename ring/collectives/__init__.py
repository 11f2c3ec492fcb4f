"""Collectives made of a communicator's: sums, Adasum, and compressed ones on one level or two."""
