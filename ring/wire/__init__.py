"""Sockets of our own, and what travels on them: keys, proofs, frames, the launcher's store."""
