"""What transformers saved computes the same here: logits and every gradient, on one rank and on four that share a sequence.

Weights come in by the way of `--load-hf`: a model under FSDP2, each rank reading its rows. fp32 against fp32.
"""

import pytest
import torch

from megacp import parallel_state
from megacp.checkpointing.huggingface import HuggingFaceWeights, hugging_face_name
from megacp.checkpointing.huggingface_config import model_config
from megacp.context_parallel.engine import AttentionSettings
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.kernels.attention import Documents
from megacp.kernels.rms_norm import rms_norm
from megacp.kernels.rotary import attention_factor, inverse_frequencies
from megacp.memory.policy import LayerPlan
from megacp.memory.store import ActivationStore, Geometry
from megacp.model.layer_context import LayerContext
from megacp.model.llama import Llama
from megacp.parallel_state import ParallelLayout
from megacp.training.sharding import allocate_weights, build_model
from tests.checkpointing.pretrained_models import MODELS, VOCABULARY, save_model
from tests.distributed import run_distributed

TOKENS = 320
TOLERANCE = 1e-5  # ||ours - theirs|| / ||theirs||


def _tokens_and_labels():
    generator = torch.Generator().manual_seed(23)
    return torch.randint(VOCABULARY, (2, TOKENS), generator=generator).unbind(0)


def _layer_context(config):
    """One document over the whole sequence, in two stages or more of heads."""
    rank, size = parallel_state.get_context_parallel_rank(), parallel_state.get_context_parallel_world_size()
    schedule = build_head_schedule(config.num_attention_heads, config.num_query_groups, size, 4)
    attention = AttentionSettings(
        schedule, parallel_state.get_ulysses_group(), Documents((0, TOKENS)), config.kv_channels**-0.5, "reference"
    )
    positions_T = torch.arange(rank * TOKENS // size, (rank + 1) * TOKENS // size)
    inv_freq_D2 = inverse_frequencies(config.kv_channels, config.rotary_base, config.rope_scaling)
    geometry = Geometry.of(config, schedule, TOKENS // size, 37, torch.float32)
    store = ActivationStore([LayerPlan()] * config.num_layers, geometry, torch.device("cpu"))
    return LayerContext(attention, positions_T, inv_freq_D2, attention_factor(config.rope_scaling), tile_size=37, store=store)


@torch.no_grad()
def _logits(model, tokens_T, context):
    """The output head never makes them all; here they are made from what goes into it."""
    h_Td = model.embedding(tokens_T)
    for layer in model.layers:
        h_Td = layer(h_Td, context)
    head = model.output_head
    return rms_norm(h_Td, head.norm, head.norm_epsilon) @ (model.embedding.weight if head.lm_head is None else head.lm_head).T


def _logits_and_gradients(rank, world_size, directories):
    """This rank's logits, and the whole gradients, of each model."""
    parallel_state.initialize_model_parallel(ParallelLayout(world_size, world_size))
    tokens_S, labels_S = _tokens_and_labels()
    mine = slice(rank * TOKENS // world_size, (rank + 1) * TOKENS // world_size)
    results = []
    for directory in directories:
        weights = HuggingFaceWeights(directory)
        config = weights.config
        context = _layer_context(config)
        model = build_model(config, parallel_state.get_data_context_mesh(), torch.float32)
        allocate_weights(model, torch.device("cpu"), 0, weights)
        model(tokens_S[mine], labels_S[mine], context, 1 / TOKENS, 41).backward()
        plain = Llama(config)
        plain.load_state_dict({name: parameter.full_tensor() for name, parameter in model.named_parameters()})
        gradients = {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}
        results.append((_logits(plain, tokens_S[mine], context), gradients if rank == 0 else None))
    return results


def _of_transformers(model):
    tokens_S, labels_S = _tokens_and_labels()
    logits_SV = model(tokens_S[None], use_cache=False).logits[0]
    torch.nn.functional.cross_entropy(logits_SV, labels_S).backward()
    return logits_SV.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def _error(ours, theirs):
    return ((ours.double() - theirs.double()).norm() / theirs.double().norm()).item()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders, and the logits and gradients of transformers, by name of the model and std of its weights."""
    folders, expected = {}, {}
    for std in (0.02, 0.2):
        for name, (family, tied, rope) in MODELS.items():
            folder = tmp_path_factory.mktemp("model")
            model = save_model(folder, family, tied, rope, std, max_shard_size="50KB")
            folders[name, std], expected[name, std] = folder, _of_transformers(model)
    return folders, expected


@pytest.mark.parametrize("world_size", [1, 4])
def test_logits_and_gradients_are_those_of_transformers(saved, world_size):
    folders, expected = saved
    by_rank = run_distributed(_logits_and_gradients, world_size, list(folders.values()))
    worst = {}
    for case, *ranks in zip(folders, *by_rank):
        logits_SV, gradients = expected[case]
        ours = {hugging_face_name(name): gradient for name, gradient in ranks[0][1].items()}
        assert ours.keys() == gradients.keys()
        errors = {"logits": _error(torch.cat([logits_TV for logits_TV, _ in ranks]), logits_SV)}
        errors |= {name: _error(ours[name], gradient) for name, gradient in gradients.items()}
        worst[case] = max((error, name) for name, error in errors.items())
    assert max(worst.values())[0] < TOLERANCE, worst


def test_the_cases_are_what_they_say(saved):
    """A config that was not read would make the comparison empty."""
    scalings = {name: model_config(saved[0][name, 0.2]).rope_scaling for name in MODELS}
    assert [scaling and scaling.type for scaling in scalings.values()] == ["llama3", "yarn", None, "yarn"]
