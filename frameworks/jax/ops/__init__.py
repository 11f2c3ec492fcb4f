"""Collectives on JAX's arrays, eager and as ordered operations of compiled programs."""
