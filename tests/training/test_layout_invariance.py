"""Ten steps of training give the same losses on every layout, and those of a plain float64 training loop.

The real loop runs on 1, 2 and 4 ranks over data whose masked labels lie as badly as they can: the second quarter of every sequence
holds nothing else (one rank of four), every fourth sequence holds nothing else (a micro-batch), the rest differ sample by sample.
Only a loss divided by the labels of the whole global batch comes out alike.
"""

import functools

import numpy as np
import pytest
import torch

from megacp import parallel_state
from megacp.arguments import model_config_from_args, parse_args, validate_args
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.parallel_state import ParallelLayout
from megacp.training.loop import TrainingRun
from megacp.training.optimizer import build_optimizer
from megacp.training.sharding import allocate_weights, build_model
from megacp.training.step import step_settings
from tests.distributed import run_distributed
from tests.reference import IGNORED_LABEL, reference_model

STEPS, SEQ_LENGTH, VOCABULARY, EOD = 10, 96, 31, 30
LEARNING_RATE, WEIGHT_DECAY, CLIP, BETAS, EPSILON = 3e-3, 0.1, 1.0, (0.9, 0.95), 1e-8
FLAGS = f"""--num-layers 2 --hidden-size 32 --ffn-hidden-size 48 --num-attention-heads 8 --num-query-groups 2 --kv-channels 8
    --vocab-size {VOCABULARY} --init-method-std 0.1
    --seq-length {SEQ_LENGTH} --global-batch-size 4 --train-iters {STEPS} --fp32 --device cpu
    --lr {LEARNING_RATE} --lr-decay-style constant --weight-decay {WEIGHT_DECAY} --clip-grad {CLIP}
    --mlp-tile-size 10 --loss-tile-size 14 --mock-data --reset-position-ids"""

FAMILIES = {  # tied embeddings are in FSDP's root unit, untied ones in units of their own
    "tied": "--no-untie-embeddings-and-output-weights --qk-layernorm",
    "untied": "--untie-embeddings-and-output-weights",
}
TOLERANCE = 1e-5  # relative, of losses and gradient norms in fp32; measured: 1.3e-7

# Ranks and what differs from one rank that takes the four sequences of a step as one micro-batch.
ONE_RANK = "--micro-batch-size 4"
LAYOUTS = {
    "gradient accumulation 2": (1, "--micro-batch-size 2"),
    "DP4": (4, "--micro-batch-size 1"),
    "C2, U = cu": (2, "--micro-batch-size 4 --context-parallel-size 2 --upipe-heads-per-stage 2"),
    "C2, U = H": (2, "--micro-batch-size 4 --context-parallel-size 2 --cp-comm-type a2a"),
    "C2, lean": (2, "--micro-batch-size 2 --context-parallel-size 2 --activation-memory lean --upipe-query-chunk 20"),
    "C2, attention again": (2, "--micro-batch-size 4 --context-parallel-size 2 --activation-memory host --recompute-granularity full"),
    "C2, nothing again": (2, "--micro-batch-size 2 --context-parallel-size 2 --activation-memory gpu --recompute-granularity none"),
    "optimizer on the host, accumulation": (1, "--micro-batch-size 2 --optimizer-cpu-offload"),
    "C2, optimizer on the host": (2, "--micro-batch-size 4 --context-parallel-size 2 --optimizer-cpu-offload"),
    "C4, U = cu, accumulation": (4, "--micro-batch-size 1 --context-parallel-size 4 --upipe-heads-per-stage 4"),
    "C4, U = H, accumulation 2": (4, "--micro-batch-size 2 --context-parallel-size 4 --cp-comm-type a2a"),
    "DP2, accumulation 2, balanced": (2, "--micro-batch-size 1 --balance-batches"),
    "DP2 x C2": (4, "--micro-batch-size 2 --context-parallel-size 2 --upipe-heads-per-stage 4"),
    "DP2 x C2, accumulation 2": (4, "--micro-batch-size 1 --context-parallel-size 2 --upipe-heads-per-stage 2"),
}


class LopsidedDataset:
    """Documents that end in one EOD or a run of them; --eod-mask-loss masks the label where the input is EOD."""

    seq_length = SEQ_LENGTH

    def __len__(self):
        return 1000

    def source(self, i):
        return "lopsided data"

    def document_borders(self, i):
        tokens = self._sequence(i)
        inner = [place for place in range(1, SEQ_LENGTH) if tokens[place - 1] == EOD != tokens[place]]
        return np.array([0, *inner, SEQ_LENGTH])

    def tokens(self, i, start, stop):
        return self._sequence(i)[start:stop]

    def label_count(self, i):
        return SEQ_LENGTH

    def _sequence(self, i):
        random = np.random.default_rng([5, i])
        tokens = np.arange(SEQ_LENGTH + 1) * (1 + i % 3) % EOD  # something to learn
        tokens[random.random(SEQ_LENGTH + 1) < (i % 5) / 8] = EOD
        tokens[SEQ_LENGTH // 4 : SEQ_LENGTH // 2] = EOD
        if i % 4 == 3:
            tokens[:-1] = EOD
        return tokens


class Recorder(list):
    """Stands in for the metrics logger."""

    log = list.append


def _train(rank, world_size, flags):
    """Losses and gradient norms of ten steps, and the weights they began with."""
    args = parse_args(f"{FLAGS} {flags}".split())
    validate_args(args, world_size)
    args.eod_mask_loss = True  # refused together with --mock-data, whose place LopsidedDataset takes
    config = model_config_from_args(args)
    layout = ParallelLayout(world_size, args.context_parallel_size)
    parallel_state.initialize_model_parallel(layout)
    schedule = build_head_schedule(
        config.num_attention_heads, config.num_query_groups, layout.ulysses_degree, args.upipe_heads_per_stage
    )
    device = torch.device("cpu")
    settings = step_settings(args, config, layout, schedule, device, torch.float32)
    model = build_model(config, parallel_state.get_data_context_mesh(), torch.float32, args.optimizer_cpu_offload)
    allocate_weights(model, device, args.seed, states_on_host=args.optimizer_cpu_offload)
    weights = {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(
        model, lr=args.lr, weight_decay=args.weight_decay, betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_eps
    )
    records = Recorder()
    TrainingRun(args, config, settings, model, optimizer, LopsidedDataset(), EOD, device, torch.float32).train(records)
    return [record.loss for record in records], [record.grad_norm for record in records], weights, config


@functools.cache
def _one_rank(family):
    (result,) = run_distributed(_train, 1, f"{FAMILIES[family]} {ONE_RANK}")
    return result


def _plain_float64_training(weights, config):
    """The same ten steps without megacp: one stream of four sequences, autograd, torch's AdamW and clipping."""
    params = {name: value.double().requires_grad_() for name, value in weights.items()}
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in params.values() if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
         {"params": [p for p in params.values() if p.ndim == 1], "weight_decay": 0.0}],
        lr=LEARNING_RATE, betas=BETAS, eps=EPSILON,
    )  # fmt: skip
    data, losses, norms = LopsidedDataset(), [], []
    for step in range(STEPS):
        tokens, labels, positions, borders = [], [], [], [0]
        for sample in range(4 * step, 4 * step + 4):
            sequence = data.tokens(sample, 0, SEQ_LENGTH + 1).tolist()
            position = 0
            for token, label in zip(sequence, sequence[1:]):
                tokens.append(token)
                labels.append(IGNORED_LABEL if token == EOD else label)
                positions.append(position)
                position += 1
                if (token == EOD and label != EOD) or len(tokens) % SEQ_LENGTH == 0:
                    borders.append(len(tokens))
                    position = 0
        labels_S = torch.tensor(labels)
        loss_sum, _ = reference_model(params, torch.tensor(tokens), labels_S, torch.tensor(positions), borders, config)
        loss = loss_sum / (labels_S != IGNORED_LABEL).sum()
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(params.values(), CLIP).item())
        optimizer.step()
        losses.append(loss.item())
    return losses, norms


@pytest.mark.parametrize("family", FAMILIES)
def test_one_rank_trains_as_a_plain_float64_loop_does(family):
    losses, norms, weights, config = _one_rank(family)
    expected_losses, expected_norms = _plain_float64_training(weights, config)
    assert losses == pytest.approx(expected_losses, rel=TOLERANCE)
    assert norms == pytest.approx(expected_norms, rel=TOLERANCE)
    assert losses[-1] < losses[0] - 0.3, "the comparison says little when nothing is learned"
    assert max(norms) > CLIP, "nor when nothing is clipped"


@pytest.mark.parametrize("name, family", [*((name, "tied") for name in LAYOUTS), ("DP2 x C2", "untied")])
def test_loss_curve_is_that_of_one_rank(name, family):
    losses, norms, weights, _ = _one_rank(family)
    world_size, flags = LAYOUTS[name]
    own_losses, own_norms, own_weights, _ = run_distributed(_train, world_size, f"{FAMILIES[family]} {flags}")[0]
    assert all(torch.equal(own_weights[key], value) for key, value in weights.items()), "initial weights"
    assert own_losses == pytest.approx(losses, rel=TOLERANCE)
    assert own_norms == pytest.approx(norms, rel=TOLERANCE)
