"""What travels on sockets of our own: keys, proofs, frames, and the launcher's store."""
