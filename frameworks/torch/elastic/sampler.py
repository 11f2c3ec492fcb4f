"""A sampler that knows how far an epoch has come."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sized
from typing import Any

import torch.utils.data

from ringlet.job.topology import rank, size


class ElasticSampler(torch.utils.data.Sampler[int]):
    """Divides what is left of an epoch over the ranks, shuffled alike on all of them.

    ``record_batch`` after every batch counts what has been processed, ``set_epoch`` starts anew.
    After ``load_state_dict``, for example by a ``TorchState``, the epoch goes on where it was. If
    ranks do not divide what is left, the first samples come twice.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset, self.shuffle, self.seed = dataset, shuffle, seed
        self.epoch = self.processed_num = 0
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch."""
        self.epoch, self.processed_num = epoch, 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Count a batch that every rank has processed."""
        self.processed_num += batch_size * self.num_replicas

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch, and how many samples of it have been processed on all ranks."""
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where ``state_dict`` was taken."""
        self.epoch, self.processed_num = state_dict["epoch"], state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide what is left of the epoch over the ranks."""
        self.num_replicas, self.rank = size(), rank()
        indices = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(indices)
        self.remaining_indices = indices[self.processed_num :]
        self.num_samples = -(-len(self.remaining_indices) // self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        """Return this rank's share of what was left when the epoch began or was gone back to."""
        left = self.remaining_indices
        share = [left[i % len(left)] for i in range(self.rank, self.total_size, self.num_replicas)]
        return iter(share)

    def __len__(self) -> int:
        """Return how many samples this rank gets."""
        return self.num_samples
