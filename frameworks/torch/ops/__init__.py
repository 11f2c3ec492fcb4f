"""Collectives on torch tensors, under Horovod's names, and the handles of those under way."""
