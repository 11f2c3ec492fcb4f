"""Compressors as JAX's own operations: payloads between the devices of a mesh, inside shard_map."""
