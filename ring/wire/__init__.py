"""What travels on sockets of our own: keys, the proof that an end knows them, and frames."""
