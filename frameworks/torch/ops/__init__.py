"""Collectives on torch tensors: reductions, movements (gather, broadcast, all-to-all), handles."""
