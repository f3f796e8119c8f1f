"""The decoder layer and the model on one GPU against the float64 reference, with every attention backend that is there."""

import tempfile

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention import Documents, select_backend
from megacp.kernels.rotary import attention_factor, inverse_frequencies
from megacp.memory.policy import LayerPlan
from megacp.memory.store import ActivationStore, Geometry
from megacp.model.layer_context import LayerContext
from megacp.model.llama import Llama
from tests.model.cases import TOLERANCE, relative_error, tiny_config
from tests.reference import random_parameters, reference_model

TOKENS, TILE = 1504, 140  # the tile divides no rank's tokens, of one rank or of eight
BORDERS = {"one document": (0, TOKENS), "documents": (0, 1, 2, 500, 501, 1377, TOKENS)}
BACKENDS = ("fa4", "fa3", "fa2", "cudnn", "torch", "reference")

# bf16 rounds each stored tensor by up to 2^-9 = 0.2%. Between a weight and its gradient lie some 15 such roundings a layer, which add
# like a random walk: 1% over 3 layers. A wrong head, position or document moves a tensor by 10% and more.
BFLOAT16_TOLERANCE = 0.03


def config_of(heads, kv_heads, qk_layernorm=False, untied=True):
    return tiny_config(
        heads, kv_heads, hidden_size=256, ffn_hidden_size=384, kv_channels=64, vocab_size=512, qk_layernorm=qk_layernorm,
        untie_embeddings_and_output_weights=untied,
    )  # fmt: skip


def tokens_and_labels(config):
    generator = torch.Generator().manual_seed(2)
    tokens_S = torch.randint(0, config.vocab_size, (TOKENS,), generator=generator)
    labels_S = torch.randint(0, config.vocab_size, (TOKENS,), generator=generator)
    labels_S[100:400] = -100
    return tokens_S, labels_S


def parameters(config, dtype):
    return {name: p.to(dtype) for name, p in random_parameters(config, std=0.06, seed=1).items()}


def reference_gradients(config, dtype, cu_seqlens):
    """Loss, and gradients by name, in float64 from weights rounded to `dtype`."""
    weights = {name: p.double().requires_grad_() for name, p in parameters(config, dtype).items()}
    loss, _ = reference_model(weights, *tokens_and_labels(config), torch.arange(TOKENS), cu_seqlens, config)
    (loss / 1000).backward()
    return loss.detach() / 1000, {name: p.grad for name, p in weights.items()}


def our_gradients(
    config, dtype, heads_per_stage, cu_seqlens, backend, plan=LayerPlan(), query_chunk=None, group=None, rank=0, ranks=1
):  # fmt: skip
    """The same of our model on the GPU, of the tokens of one of `ranks` ranks."""
    model = Llama(config, device="cuda", dtype=dtype)
    model.load_state_dict(parameters(config, dtype))
    schedule = build_head_schedule(config.num_attention_heads, config.num_query_groups, ranks, heads_per_stage)
    tokens = TOKENS // ranks
    mine = slice(rank * tokens, (rank + 1) * tokens)
    geometry = Geometry.of(config, schedule, tokens, TILE, dtype)
    context = LayerContext(
        AttentionSettings(schedule, group, Documents(cu_seqlens), config.kv_channels**-0.5, backend, query_chunk),
        torch.arange(TOKENS)[mine].cuda(), inverse_frequencies(config.kv_channels, config.rotary_base, None, "cuda"),
        attention_factor(None), TILE,
        ActivationStore([plan] * config.num_layers, geometry, torch.device("cuda", torch.cuda.current_device()), tempfile.gettempdir()),
    )  # fmt: skip
    tokens_T, labels_T = (x_S[mine].cuda() for x_S in tokens_and_labels(config))
    loss = model(tokens_T, labels_T, context, 1 / 1000, 512)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def gradients(config, dtype, heads_per_stage, cu_seqlens, backend, plan=LayerPlan()):
    """Loss and gradients of our model and of the reference."""
    loss, ours = our_gradients(config, dtype, heads_per_stage, cu_seqlens, backend, plan)
    expected_loss, expected = reference_gradients(config, dtype, cu_seqlens)
    return (loss, expected_loss), {name: (grad, expected[name]) for name, grad in ours.items()}


def assert_close(losses, grads, tolerance):
    assert relative_error(losses[0].cpu(), losses[1]) < tolerance
    errors = {name: relative_error(ours.cpu(), reference) for name, (ours, reference) in grads.items()}
    worst = max(errors, key=errors.get)
    assert errors[worst] < tolerance, f"{worst}: {errors[worst]:.2e}"


@pytest.mark.parametrize("borders", BORDERS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("heads, kv_heads, heads_per_stage", [(8, 2, 2), (4, 4, 4)])
def test_bfloat16_model_matches_the_reference(backend, heads, kv_heads, heads_per_stage, borders):
    config = config_of(heads, kv_heads)
    cu_seqlens = BORDERS[borders]
    try:
        select_backend(backend, "cuda", torch.bfloat16, 64, heads, kv_heads, Documents(cu_seqlens))
    except ValueError as unavailable:
        pytest.skip(str(unavailable))
    assert_close(*gradients(config, torch.bfloat16, heads_per_stage, cu_seqlens, backend), BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("qk_layernorm, untied", [(True, True), (False, False)])
def test_bfloat16_model_with_head_norms_and_with_tied_weights(qk_layernorm, untied):
    config = config_of(8, 2, qk_layernorm, untied)
    backend = select_backend("auto", "cuda", torch.bfloat16, 64, 2, 1, Documents(BORDERS["documents"])).name
    assert_close(*gradients(config, torch.bfloat16, 2, BORDERS["documents"], backend), BFLOAT16_TOLERANCE)


@pytest.mark.parametrize("heads_per_stage", [1, 2, 4, 8])
def test_float32_model_matches_the_reference_for_every_stage_size(heads_per_stage):
    config = config_of(8, 2, qk_layernorm=True)
    assert_close(*gradients(config, torch.float32, heads_per_stage, BORDERS["documents"], "reference"), TOLERANCE[torch.float32])
