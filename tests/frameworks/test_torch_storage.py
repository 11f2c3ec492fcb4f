"""Tensors that lie in one memory are found, and those that only lie beside one another are not."""

from __future__ import annotations

import torch

from ringlet.torch.tensors.shared_storage import any_overlap, are_shared, overlaps


def test_a_storage_of_ones_own_is_not_shared():
    own, seen = torch.zeros(4), torch.zeros(4).numpy()
    sparse = torch.eye(3).to_sparse()
    assert are_shared([own, torch.from_numpy(seen), sparse]) == [False] * 3
    assert are_shared([own, own]) == [False] * 2
    part = own[1:]
    assert are_shared([own, part, torch.zeros(2), sparse]) == [True, True, False, False]


def test_a_gradient_in_its_hook_is_not_shared():
    p, found = torch.nn.Parameter(torch.zeros(3)), []
    p.register_post_accumulate_grad_hook(lambda p: found.extend(are_shared([p.grad], 0)))
    (p * 2).sum().backward()
    assert found == [False]
    p.grad = None
    q = torch.nn.Parameter(torch.zeros(1, 3))
    (p.view(1, 3) + q.view(1, 3)).mul(2).sum().backward()
    assert found == [False, True]
    assert are_shared([p.grad, q.grad]) == [True, True]


def test_overlaps_are_of_addresses():
    x = torch.zeros(10, 10)
    assert overlaps([x[:5], x[5:]]) == [False, False]
    assert overlaps([x[:5], x[4:], torch.zeros(3)]) == [True, True, False]
    assert overlaps([x, x[2], x[4], x[4, 5:]]) == [True] * 4
    assert overlaps([x[2, 3:3], x, x[:0]]) == [False] * 3
    assert overlaps([x[3], x[4], x.t()[:, 3:5]]) == [True] * 3
    assert not any_overlap([x[:5], x[5:], torch.zeros(0), torch.zeros(0)])
    assert any_overlap([x, x])
    assert not any_overlap([])
