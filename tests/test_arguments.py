"""A run that cannot work must say so in the first second, and its advice must be true."""

import copy
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacp.argument_checks import check_vocab_size
from megacp.arguments import ArgumentError, build_parser, model_config_from_args, parse_args, resolve_precision, validate_args
from megacp.context_parallel.head_schedule import build_head_schedule
from megacp.model.config import PRESETS
from megacp.parallel_state import ParallelLayout

BASE = ["--mock-data"]


def parsed(*flags):
    return parse_args([*BASE, *map(str, flags)])


def refused(*flags, world_size=1, base=BASE):
    args = parse_args([*base, *map(str, flags)])
    with pytest.raises(ArgumentError) as error:
        validate_args(args, world_size)
    return str(error.value)


# ------------------------------------------------------------------------------------------------- what is filled in


def test_what_is_left_open_is_filled_in():
    args = parsed("--model", "llama3-8b", "--context-parallel-size", 4, "--micro-batch-size", 3)
    assert validate_args(args, world_size=16) == []
    assert args.upipe_heads_per_stage == 8  # 32 heads in four stages
    assert args.global_batch_size == 3 * 4  # micro-batch x data-parallel size
    assert args.lr_decay_iters == args.train_iters


@pytest.mark.parametrize("model,context,heads", [
    ("llama3-8b", 8, 8), ("llama3-8b", 16, 16), ("llama3-8b", 1, 32), ("llama3.2-1b", 2, 8), ("llama3.2-3b", 2, 6), ("llama3.2-3b", 8, 8),
    ("qwen3-32b", 8, 16), ("llama-tiny", 4, 4),
])  # fmt: skip
def test_heads_are_taken_in_four_stages_or_fewer(model, context, heads):
    args = parsed("--model", model, "--context-parallel-size", context)
    validate_args(args, world_size=context)
    assert args.upipe_heads_per_stage == heads


@pytest.mark.parametrize("flags, tile", [
    ("--model llama3-8b", 8192), ("--model qwen3-32b", 8192), ("--model llama3.2-1b", 16384),
    ("--model llama3.2-1b --upipe-query-chunk 32768", 16384), ("--model llama3.2-1b --upipe-query-chunk 24576", 8192),
    ("--model llama3.2-1b --ffn-hidden-size 8193", 8192), ("--model llama-tiny", 32768), ("--model llama3.2-1b --mlp-tile-size 1000", 1000),
])  # fmt: skip
def test_tiles_are_longer_where_the_mlp_is_narrow(flags, tile):
    args = parsed(*flags.split())
    validate_args(args, world_size=1)
    assert args.mlp_tile_size == tile


def test_ulysses_is_one_stage_of_all_heads():
    args = parsed("--model", "llama3-8b", "--cp-comm-type", "a2a", "--context-parallel-size", 8)
    validate_args(args, world_size=8)
    assert args.upipe_heads_per_stage == 32


def test_a_global_batch_of_zero_means_no_accumulation():
    args = parsed("--global-batch-size", 0, "--micro-batch-size", 2)
    validate_args(args, world_size=4)
    assert args.global_batch_size == 8


@pytest.mark.parametrize("warmup, expected", [(0, 10), (95, 5)])
def test_wsd_decays_over_the_last_tenth_after_the_warm_up(warmup, expected):
    args = parsed("--lr-decay-style", "WSD", "--train-iters", 100, "--lr-warmup-iters", warmup)
    validate_args(args, world_size=1)
    assert args.lr_wsd_decay_iters == expected


@pytest.mark.parametrize("steps, expected", [(100, (10, 12)), (3, (3, 5))])
def test_a_profile_takes_two_steps_once_all_is_warm_or_the_last_of_a_shorter_run(steps, expected):
    args = parsed("--profile", "--profile-dir", "p", "--train-iters", steps)
    validate_args(args, world_size=1)
    assert (args.profile_step_start, args.profile_step_end) == expected


@pytest.mark.parametrize("flags, rank", [((), 0), (("--rehearse-world-size", 4, "--rehearse-rank", 2), 2)])
def test_the_rank_that_is_rehearsed_is_the_one_profiled(flags, rank):
    args = parsed("--profile", "--profile-dir", "p", *flags)
    validate_args(args, world_size=4)
    assert args.profile_ranks == [rank]


@pytest.mark.parametrize("style", ["a2a", "upipe"])
def test_validating_twice_changes_nothing(style):
    args = parsed("--cp-comm-type", style, "--context-parallel-size", 2, "--lr-decay-style", "WSD")
    validate_args(args, world_size=4)
    once = copy.deepcopy(args)
    validate_args(args, world_size=4)
    assert args == once


def test_precision_follows_the_device_unless_given():
    assert resolve_precision(parsed(), "cpu") == torch.float32
    assert resolve_precision(parsed(), torch.device("cuda", 3)) == torch.bfloat16
    assert resolve_precision(parsed("--bf16"), "cpu") == torch.bfloat16
    assert resolve_precision(parsed("--fp32"), "cuda") == torch.float32


# -------------------------------------------------------------------------------------------------------- the model


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_without_overrides_is_the_preset(name):
    assert model_config_from_args(parsed("--model", name)) == PRESETS[name]


@pytest.mark.parametrize(
    "flag, value",
    [
        ("num_layers", 3), ("hidden_size", 64), ("ffn_hidden_size", 96), ("num_attention_heads", 16), ("num_query_groups", 2),
        ("kv_channels", 8), ("vocab_size", 777), ("max_position_embeddings", 5000), ("rotary_base", 123.0),
        ("norm_epsilon", 1e-3), ("init_method_std", 0.2),
    ],
)  # fmt: skip
def test_every_field_can_be_overridden_alone(flag, value):
    config = model_config_from_args(parsed("--" + flag.replace("_", "-"), value))
    assert getattr(config, flag) == value
    changed = [f for f in config.__dataclass_fields__ if getattr(config, f) != getattr(PRESETS["llama-tiny"], f)]
    assert changed == [flag]


def test_switches_of_the_model_go_both_ways():
    assert model_config_from_args(parsed("--qk-layernorm")).qk_layernorm
    assert not model_config_from_args(parsed("--model", "qwen3-8b", "--no-qk-layernorm")).qk_layernorm
    untie = "untie-embeddings-and-output-weights"
    assert model_config_from_args(parsed(f"--{untie}")).untie_embeddings_and_output_weights
    assert not model_config_from_args(parsed("--model", "llama3-8b", f"--no-{untie}")).untie_embeddings_and_output_weights


def test_llama31_is_llama3_with_scaling():
    scaling = model_config_from_args(parsed("--model", "llama3-8b", "--rope-scaling-type", "llama3")).rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == ("llama3", 8.0, 8192)
    assert (scaling.low_freq_factor, scaling.high_freq_factor) == (1.0, 4.0)


def test_one_factor_changes_and_the_others_stay_the_presets():
    scaling = model_config_from_args(parsed("--model", "llama3.2-1b", "--rope-high-freq-factor", 8)).rope_scaling
    assert (scaling.factor, scaling.high_freq_factor) == (32.0, 8.0)


def test_scaling_can_be_taken_off_and_exchanged():
    assert model_config_from_args(parsed("--model", "llama3.2-1b", "--rope-scaling-type", "none")).rope_scaling is None
    yarn = ["--rope-scaling-type", "yarn", "--rope-scaling-factor", 128, "--rope-beta-fast", 4, "--rope-beta-slow", 1]
    scaling = model_config_from_args(parsed("--model", "qwen3-8b", *yarn)).rope_scaling
    assert (scaling.type, scaling.factor, scaling.original_max_position_embeddings) == ("yarn", 128.0, 40960)
    assert (scaling.beta_fast, scaling.beta_slow, scaling.attention_factor) == (4.0, 1.0, None)


def test_long_sequences_are_a_note_not_an_error():
    (note,) = validate_args(parsed("--model", "llama3-8b", "--seq-length", 1048576), 1)
    assert "--seq-length 1048576" in note and "8192" in note
    advice = re.findall(r"(--rope\S+) (\S+)", note)
    flags = [word for pair in advice for word in pair]
    assert validate_args(parsed("--model", "llama3-8b", "--seq-length", 1048576, *flags), 1) == []
    assert validate_args(parsed("--model", "llama3-8b", "--seq-length", 8192), 1) == []


# ------------------------------------------------------------------------------------------------------ what is refused

CASES = [
    # flags, ranks, what the message must name
    (["--model", "llama3-8"], 1, ["--model llama3-8", "llama3-8b"]),
    (["--model", "llama3-8b", "--context-parallel-size", 3], 8, ["--context-parallel-size 3", "ranks 8", "2 or 4"]),
    (["--model", "llama3-8b", "--context-parallel-size", 12], 12,
     ["--context-parallel-size 12", "--num-attention-heads 32", "4"]),
    (["--model", "llama3.2-3b", "--context-parallel-size", 3, "--seq-length", 9216], 6, ["--num-query-groups 8", "2"]),
    (["--model", "llama3-8b", "--context-parallel-size", 3, "--upipe-heads-per-stage", 2], 8, ["ranks 8; 2 works"]),
    (["--model", "llama3-8b", "--context-parallel-size", 3, "--seq-length", 8194], 8, ["ranks 8; 2 works"]),
    (["--model", "llama3-8b", "--context-parallel-size", 3, "--global-batch-size", 2], 8, ["ranks 8; 4 works"]),
    (["--model", "llama3-8b", "--context-parallel-size", 64], 64, ["--context-parallel-size 64", "32"]),
    (["--model", "llama3-8b", "--context-parallel-size", 8, "--upipe-heads-per-stage", 12], 8,
     ["--upipe-heads-per-stage 12", "multiple of --context-parallel-size 8", "8 or 16"]),
    (["--model", "llama3-8b", "--context-parallel-size", 8, "--upipe-heads-per-stage", 24], 8,
     ["--upipe-heads-per-stage 24", "--num-attention-heads 32", "16 or 32"]),
    (["--model", "llama3-8b", "--context-parallel-size", 8, "--upipe-heads-per-stage", 6], 8,
     ["--upipe-heads-per-stage 6", "; 8 works"]),
    (["--cp-comm-type", "a2a", "--upipe-heads-per-stage", 3, "--context-parallel-size", 2], 2,
     ["; without --upipe-heads-per-stage works"]),
    (["--cp-comm-type", "a2a", "--upipe-heads-per-stage", 2, "--context-parallel-size", 2], 2,
     ["--upipe-heads-per-stage 2", "--cp-comm-type a2a", "--cp-comm-type upipe"]),
    (["--pipeline-model-parallel-size", 2], 2, ["--pipeline-model-parallel-size 2", "not built yet", "1 works"]),
    (["--seq-length", 8190, "--context-parallel-size", 4], 4,
     ["--seq-length 8190", "--context-parallel-size 4", "8188 or 8192"]),
    (["--seq-length", 3, "--context-parallel-size", 4, "--micro-batch-size", 2], 4, ["--seq-length 3", "2 or 4"]),
    (["--global-batch-size", 6, "--micro-batch-size", 2], 2, ["--global-batch-size 6", "--micro-batch-size 2", "4 or 8"]),
    (["--kv-channels", 33], 1, ["--kv-channels 33", "34"]),
    (["--num-attention-heads", 12, "--num-query-groups", 5], 1,
     ["--num-query-groups 5", "--num-attention-heads 12", "4 or 6"]),
    (["--bf16", "--fp32"], 1, ["--bf16", "--fp32"]),
    (["--device", "cpu", "--attention-backend", "fa4"], 1, ["--attention-backend fa4", "--device cuda", "reference"]),
    (["--train-iters", 50, "--lr-warmup-iters", 50], 1, ["--lr-warmup-iters 50", "--train-iters 50", "5"]),
    (["--lr-decay-iters", 20, "--lr-warmup-iters", 30], 1, ["--lr-warmup-iters 30", "--lr-decay-iters 20"]),
    (["--lr", 1e-4, "--min-lr", 1e-3], 1, ["--min-lr 0.001", "--lr 0.0001", "1e-05"]),
    (["--lr-wsd-decay-iters", 5], 1, ["--lr-wsd-decay-iters 5", "--lr-decay-style cosine"]),
    (["--lr-decay-style", "WSD", "--train-iters", 10, "--lr-warmup-iters", 5, "--lr-wsd-decay-iters", 6], 1,
     ["--lr-wsd-decay-iters 6", "5"]),
    (["--data-path", "corpus"], 1, ["--mock-data", "--data-path"]),
    (["--train-data-path", "corpus"], 1, ["--mock-data and --train-data-path contradict"]),
    (["--valid-data-path", "corpus"], 1, ["--valid-data-path corpus", "needs --train-data-path"]),
    (["--balance-batches", "--attention-mask", "causal"], 1, ["--attention-mask causal", "; without --balance-batches works"]),
    (["--split", "1;2"], 1, ["--split 1;2", "969,30,1"]),
    (["--split", "0,1"], 1, ["--split 0,1"]),
    (["--split", "1,nan"], 1, ["--split 1,nan"]),
    (["--activation-memory", "disk"], 1, ["--activation-memory disk", "--disk-offload-dir", "--activation-memory host works"]),
    (["--profile-step-start", 5], 1, ["--profile-step-start 5 needs --profile;", "--profile --profile-dir profiles or without"]),
    (["--tensorboard-dir", "runs", "--profile-dir", "p"], 1, ["--profile-dir p needs --profile; --profile or without --profile-dir"]),
    (["--profile-ranks", 0, "--profile"], 1, ["--profile needs --profile-dir or --tensorboard-dir; --profile-dir profiles works"]),
    (["--profile", "--profile-dir", "p", "--train-iters", 4, "--profile-step-start", 5], 1,
     ["--profile-step-start 5", "--train-iters 4; 4 works"]),
    (["--profile", "--profile-dir", "p", "--profile-step-end", 3], 1, ["--profile-step-end 3", "--profile-step-start 1 or without"]),
    (["--profile", "--profile-dir", "p", "--profile-step-start", 7, "--profile-step-end", 7], 1,
     ["--profile-step-end 7", "--profile-step-start 7; 8 works"]),
    (["--profile", "--profile-dir", "p", "--profile-ranks", 2], 2, ["--profile-ranks 2", "none of the 2 ranks; 0 works"]),
    (["--profile-ranks", 0, 3], 4, ["--profile-ranks 0 3 needs --profile;"]),
    (["--profile", "--profile-dir", "p", "--rehearse-world-size", 4, "--rehearse-rank", 2, "--profile-ranks", 3], 4,
     ["--profile-ranks 3 is not the one rehearsed, --rehearse-rank 2;", "--profile-ranks 2 or --rehearse-rank 3 works"]),
    (["--rehearse-layers", 2], 1, ["--rehearse-layers 2 needs --rehearse-world-size", "--rehearse-world-size 8", "without"]),
    (["--rehearse-world-size", 1, "--num-layers", 4, "--rehearse-layers", 5], 1,
     ["--rehearse-layers 5 is more than the 4 layers of --num-layers", "--rehearse-layers 4 or without --rehearse-layers works"]),
    (["--disk-memory-gib", 5], 1, ["--disk-memory-gib 5", "--disk-offload-dir", "without --disk-memory-gib works"]),
    (["--save-interval", 10], 1, ["--save-interval 10", "--save"]),
    (["--pretrained-checkpoint", "a", "--load", "b", "--finetune"], 1, ["--pretrained-checkpoint a and --finetune contradict each other"]),
    (["--pretrained-checkpoint", "a", "--load", "b", "--ckpt-step", "3"], 1, ["--pretrained-checkpoint a and --ckpt-step contradict"]),
    (["--finetune", "--save", "a"], 1, ["--finetune needs --load DIR; --load checkpoints or without --finetune works"]),
    (["--no-load-optim", "--save", "a"], 1, ["--no-load-optim needs --load DIR;", "without --no-load-optim works"]),
    (["--ckpt-step", 0], 1, ["--ckpt-step 0 needs --load DIR;", "without --ckpt-step works"]),
    (["--rope-scaling-factor", 8], 1, ["--rope-scaling-factor 8", "--rope-scaling-type none"]),
    (["--rope-scaling-type", "llama3", "--rope-beta-fast", 8], 1, ["--rope-beta-fast 8", "--rope-scaling-type llama3"]),
    (["--rope-scaling-type", "yarn", "--seq-length", 81921], 1, ["--rope-scaling-factor 11 works", "--seq-length 81921"]),
    (["--model", "llama3.2-1b", "--rope-low-freq-factor", 4], 1, ["--rope-low-freq-factor 4", "--rope-high-freq-factor 4"]),
    (["--rope-scaling-type", "yarn", "--rope-scaling-factor", 2, "--rope-beta-fast", 0.5], 1, ["--rope-beta-fast 0.5", "32"]),
]  # fmt: skip


@pytest.mark.parametrize("flags, world_size, named", CASES, ids=[" ".join(map(str, case[0])) for case in CASES])
def test_the_message_names_flag_value_and_a_value_that_works(flags, world_size, named):
    message = refused(*flags, world_size=world_size)
    assert all(part in message for part in named), message


DATA_CASES = [
    ([], ["--data-path", "--mock-data"]),
    (["--data-path", "corpus"], ["--tokenizer-type"]),
    (["--data-path", "corpus", "--tokenizer-type", "SentencePiece"], ["--tokenizer-type SentencePiece", "--tokenizer-model"]),
    (["--data-path", "a", "b"], ["--data-path", "'a'", "1 a 1 b works"]),
    (["--data-path", "1", "a", "2"], ["--data-path 1 a 2", "--data-path a works"]),
    (["--data-path", "0", "a", "2", "b"], ["--data-path", "weight 0", "1 a 1 b works"]),
    (["--data-path", "a", "--train-data-path", "b"], ["--data-path and --train-data-path contradict each other"]),
    (["--train-data-path", "a", "--valid-data-path", "b", "c"], ["--valid-data-path", "found 'b'", "1 b 1 c works"]),
    (["--train-data-path", "a"], ["--train-data-path needs the --tokenizer-model"]),
    (["--data-path", "a", "--tokenizer-type", "Tiktoken"], ["--tokenizer-type Tiktoken", "--tokenizer-model tokenizer.model works"]),
    (["--data-path", "a", "--test-data-path", "b"], ["--test-data-path b", "--data-path is divided by --split"]),
    (["--train-data-path", "a", "--valid-data-path", "b", "--tokenizer-type", "Byte"], ["--valid-data-path b", "--eval-interval 100 or"]),
    (["--train-data-path", "a", "--eval-interval", "7", "--tokenizer-type", "Byte"], ["--eval-interval 7 needs --valid-data-path"]),
    (["--data-path", "a", "--eval-interval", "7", "--split", "9,0,1", "--tokenizer-type", "Byte"],
     ["--eval-interval 7", "--split 9,0,1", "--split 969,30,1 or without --eval-interval works"]),
]


@pytest.mark.parametrize("flags, named", DATA_CASES)
def test_data_flags_that_cannot_work(flags, named):
    message = refused(*flags, base=[])
    assert all(part in message for part in named), message


@pytest.mark.parametrize("path", [["corpus"], ["0.7", "a", "0.3", "b"], ["1", "a"]])
def test_data_flags_that_work(path):
    validate_args(parse_args(["--data-path", *path, "--tokenizer-type", "Byte"]), 1)
    validate_args(parse_args(["--data-path", *path, "--tokenizer-model", "tokenizer.json"]), 1)
    parts = ["--train-data-path", *path, "--valid-data-path", "v", "--test-data-path", *path]
    validate_args(parse_args([*parts, "--tokenizer-type", "Byte", "--eval-interval", "5"]), 1)
    validate_args(parse_args(["--data-path", *path, "--tokenizer-type", "Byte", "--eval-interval", "5"]), 1)


def test_vocabulary_smaller_than_the_tokenizer():
    config = PRESETS["llama-tiny"]
    check_vocab_size(config, 4096)
    with pytest.raises(ArgumentError, match=r"--vocab-size 4096 .* 4097 ids; 4224 works"):
        check_vocab_size(config, 4097)


@pytest.mark.parametrize(
    "flags",
    [
        ["--mlp-tile-size", "0"], ["--loss-tile-size", "-1"], ["--ckpt-keep", "0"], ["--lr", "0"], ["--lr", "nan"],
        ["--adam-beta1", "1"], ["--clip-grad", "-1"], ["--train-iters", "1.5"], ["--rope-scaling-factor", "0.5"],
        ["--log-interval", "0"], ["--device-peak-tflops", "0"],
        ["--distributed-timeout-minutes", "-1"], ["--cp-comm-type", "p2p"], ["--seq", "8"],
    ],
)  # fmt: skip
def test_a_value_outside_its_range_ends_with_the_flag_and_the_range(flags, capsys):
    with pytest.raises(SystemExit):
        parse_args([*BASE, *flags])
    message = capsys.readouterr().err
    assert flags[0] in message and flags[1] in message


# --------------------------------------------------------------------------------------------- the advice is true


def follow(args, world_size, choose, limit=30):
    """Take the advice until nothing is refused. No rule may be broken twice in a row: its own advice did not work then."""
    previous = None
    for _ in range(limit):
        try:
            validate_args(args, world_size)
            return
        except ArgumentError as error:
            rule = str(error).split()[0], re.sub(r"\S*\d\S*", "", str(error).split("; ")[0])
            assert rule != previous, error
            assert error.fixes, error
            previous = rule
            for name, value in choose(error.fixes).items():
                setattr(args, name, value)
    raise AssertionError(f"the advice does not end: {previous}")


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_following_the_advice_ends_in_a_run_that_starts(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    args = parse_args(["--model", draw(*PRESETS)])
    small = st.integers(1, 48)
    args.num_attention_heads = data.draw(st.one_of(st.none(), small))
    args.num_query_groups = data.draw(st.one_of(st.none(), small))
    args.kv_channels = draw(None, 7, 64)
    args.context_parallel_size = data.draw(small)
    args.pipeline_model_parallel_size = draw(1, 2)
    args.cp_comm_type = draw("a2a", "upipe")
    args.upipe_heads_per_stage = data.draw(st.one_of(st.none(), small))
    args.seq_length = data.draw(st.integers(1, 300_000))
    args.micro_batch_size = data.draw(st.integers(1, 6))
    args.global_batch_size = data.draw(st.one_of(st.none(), st.integers(0, 64)))
    args.train_iters = data.draw(st.integers(1, 40))
    args.lr_warmup_iters = data.draw(st.integers(0, 40))
    args.lr_decay_iters = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    args.lr_decay_style = draw("cosine", "constant", "WSD")
    args.lr_wsd_decay_iters = data.draw(st.one_of(st.none(), st.integers(1, 40)))
    args.lr, args.min_lr = draw(1e-4, 3.3337e-4), draw(0.0, 5e-4)
    args.bf16, args.fp32 = draw(True, False), draw(True, False)
    args.device, args.attention_backend = draw("auto", "cpu"), draw("auto", "fa3", "torch")
    args.mock_data, args.data_path = draw(True, False), draw(None, ["a"], ["a", "b"], ["1", "a", "x"], ["-1", "a"])
    args.train_data_path, args.valid_data_path = draw(None, ["a"], ["a", "b"]), draw(None, ["a"], ["1", "a", "x"])
    args.eval_interval = draw(None, 5)
    args.balance_batches, args.attention_mask = draw(True, False), draw("document", "causal")
    args.tokenizer_type = draw(None, "Byte", "SentencePiece")
    args.split = draw("969,30,1", "1,0", "x", "0,0,0", "1,1,1,1")
    args.save_interval = draw(None, 3)
    args.rope_scaling_type = draw(None, "none", "llama3", "yarn")
    args.rope_scaling_factor = draw(None, 4.0)
    args.rope_low_freq_factor, args.rope_high_freq_factor = draw(None, 8.0), draw(None, 0.5, 6.0)
    args.rope_beta_fast, args.rope_beta_slow = draw(None, 0.25), draw(None, 64.0)
    world_size = data.draw(st.integers(1, 64))

    follow(args, world_size, lambda fixes: draw(*fixes))

    config, context = model_config_from_args(args), args.context_parallel_size
    heads, groups, stage = config.num_attention_heads, config.num_query_groups, args.upipe_heads_per_stage
    build_head_schedule(heads, groups, context, stage)  # refuses what does not fit
    assert ParallelLayout(world_size, context).data_parallel_size == world_size // context
    assert world_size % context == 0 and heads % groups == 0 and heads % stage == 0 and stage % context == 0
    assert groups % context == 0 or context % groups == 0
    assert args.seq_length * args.micro_batch_size % context == 0
    assert args.global_batch_size % (args.micro_batch_size * world_size // context) == 0 < args.global_batch_size
    assert args.lr_warmup_iters < args.train_iters and args.min_lr <= args.lr
    assert bool(args.mock_data) + bool(args.data_path) + bool(args.train_data_path) == 1
    assert args.train_data_path or not args.valid_data_path
    assert args.eval_interval or not args.valid_data_path
    assert args.valid_data_path or not (args.train_data_path and args.eval_interval)


ONE_MISTAKE = [case for case in CASES[1:] if not {"--data-path", "--train-data-path"} & set(case[0])]


@pytest.mark.parametrize("flags, world_size, named", ONE_MISTAKE, ids=[case[0][-2] for case in ONE_MISTAKE])
def test_every_alternative_of_the_advice_works(flags, world_size, named):
    args = parsed(*flags)
    with pytest.raises(ArgumentError) as error:
        validate_args(args, world_size)
    assert error.value.fixes
    for fix in error.value.fixes:
        fixed = copy.deepcopy(args)
        for name, value in fix.items():
            assert hasattr(fixed, name)
            setattr(fixed, name, value)
        validate_args(fixed, world_size)


# -------------------------------------------------------------------------------------------------------------- help


def test_every_flag_has_a_help_text_and_a_group():
    parser = build_parser()
    for action in parser._actions:
        assert action.help, action.option_strings
    grouped = {action.dest for group in parser._action_groups[2:] for action in group._group_actions}
    assert grouped == {action.dest for action in parser._actions} - {"help"}


def test_help_shows_defaults_also_when_they_are_zero():
    text = " ".join(build_parser().format_help().split())
    assert "where the decay ends (default: 0.0)" in text
    assert "steps of linear growth from 0 (default: 0)" in text
    assert "(default: None)" not in text and "(default: False)" not in text
