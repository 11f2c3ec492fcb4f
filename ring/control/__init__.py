"""The control plane: small messages between every rank and rank 0, and signs of life."""
