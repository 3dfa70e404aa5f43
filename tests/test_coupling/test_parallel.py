# Copyright (c) fgc_mm contributors. Licensed under Apache-2.0.
import pytest
import torch
from torch import Tensor

from fgc_mm.coupling import CouplingResult, LayerCoupling, map_layers

CPU = torch.device('cpu')


def loss_and_gradients(side_by_side: bool) -> tuple[Tensor, list[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    layers = [LayerCoupling(500, 16, k=5, seed=seed) for seed in range(3)]
    inputs = [
        (
            torch.rand(8, 16, generator=generator),
            torch.randn(8, 16, generator=generator).requires_grad_(),
        )
        for _ in layers
    ]
    indices = torch.arange(8)

    def couple(n: int) -> CouplingResult:
        return layers[n].loss(*inputs[n], indices)

    numbers = range(len(layers))
    results = map_layers(couple, numbers, CPU) if side_by_side else [couple(n) for n in numbers]
    assert not any(result.value.requires_grad for result in results)
    losses = [result.loss for result in results]
    loss = 3 * torch.stack(losses).sum()
    loss.backward()
    return loss.detach(), [logits.grad for _, logits in inputs]


def test_same_as_one_after_the_other(two_threads):
    loss, gradients = loss_and_gradients(side_by_side=True)
    expected, expected_gradients = loss_and_gradients(side_by_side=False)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients)


def test_threads_are_divided_and_given_back(two_threads):
    assert map_layers(lambda _: torch.get_num_threads(), range(4), CPU) == [1] * 4
    assert torch.get_num_threads() == 2
    torch.set_num_threads(3)
    assert map_layers(lambda _: torch.get_num_threads(), range(1), CPU) == [3]


def test_an_error_in_a_layer_reaches_the_caller(two_threads):
    def fail(n: int) -> None:
        raise ValueError(f'layer {n}')

    with pytest.raises(ValueError, match='layer 0'):
        map_layers(fail, range(2), CPU)
