"""The output head as autograd sees it: gradients of a loss that is used further, and of how many of them there are."""

import pytest
import torch

from megacp.model.config import preset
from megacp.model.output_head import OutputHead


def head_and_input(tokens=10):
    torch.manual_seed(3)
    head = OutputHead(preset("llama-tiny"), dtype=torch.float64)
    config = preset("llama-tiny")
    torch.nn.init.normal_(head.norm)
    weight_Vd = torch.randn(64, config.hidden_size, dtype=torch.float64, requires_grad=True)
    h_Td = torch.randn(tokens, config.hidden_size, dtype=torch.float64, requires_grad=True)
    return head, weight_Vd, h_Td, torch.randint(64, (tokens,))


def test_gradients_follow_what_is_made_of_the_loss():
    head, weight_Vd, h_Td, labels_T = head_and_input()
    inputs = h_Td, head.norm, weight_Vd
    alone = torch.autograd.grad(head(h_Td, labels_T, 0.1, 4, weight_Vd), inputs)
    used = torch.autograd.grad(2.5 * head(h_Td, labels_T, 0.1, 4, weight_Vd), inputs)
    for one, other in zip(alone, used):
        torch.testing.assert_close(other, 2.5 * one, rtol=1e-14, atol=0)


def test_gradients_are_handed_over_once():
    head, weight_Vd, h_Td, labels_T = head_and_input()
    loss = head(h_Td, labels_T, 0.1, 4, weight_Vd)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once per forward"):
        loss.backward()


def test_no_tokens_give_no_loss_and_zero_gradients():
    head, weight_Vd, h_Td, labels_T = head_and_input()
    loss = head(h_Td[:0], labels_T[:0], 0.1, 4, weight_Vd)
    gradients = torch.autograd.grad(loss, (head.norm, weight_Vd))
    assert loss.item() == 0 and not any(gradient.any() for gradient in gradients)
