"""Compression inside torch's own data parallelism: DDP, FSDP2 and replicas of it."""
