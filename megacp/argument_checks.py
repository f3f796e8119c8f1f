"""What the flags of a run must satisfy together, and for each broken rule a value that works.

    --context-parallel-size 12 does not divide --num-attention-heads 32; 8 or 16 works

An `ArgumentError` carries its advice also as data, here `({"context_parallel_size": 8}, {"context_parallel_size": 16})`:
alternatives of which each one repairs the rule (None: leave the flag out). Tests follow the advice and see that it is true.
The checks are functions of numbers: no device, no file, no process group. They run in the order of `validate_args`, and
each may lean on those before it.
"""

import argparse
import math

from megacp.context_parallel.head_schedule import kv_heads_fit, legal_heads_per_stage, legal_ulysses_degrees
from megacp.data.dataset import DatasetError, parse_data_path, parse_split
from megacp.kernels.rotary import RopeScaling
from megacp.model.config import ModelConfig

LLAMA3_ONLY = ("rope_low_freq_factor", "rope_high_freq_factor")
YARN_ONLY = ("rope_beta_fast", "rope_beta_slow", "rope_attention_factor")
ANY_SCALING = ("rope_scaling_factor", "rope_original_max_position_embeddings")
FIXED_BY_WEIGHTS = (
    "num_layers", "hidden_size", "ffn_hidden_size", "num_attention_heads", "num_query_groups", "kv_channels", "vocab_size",
    "norm_epsilon", "qk_layernorm", "untie_embeddings_and_output_weights",
)  # fmt: skip
CUDA_BACKENDS = ("fa4", "fa3", "fa2", "cudnn")


class ArgumentError(ValueError):
    """Flags that cannot run. `fixes`: alternatives, each a dict from names in the namespace to values that work."""

    def __init__(self, message: str, fixes: tuple[dict, ...] = ()):
        super().__init__(message)
        self.fixes = fixes


def check_pretrained(args: argparse.Namespace, base: ModelConfig) -> None:
    """With --load-hf its config.json is the model: flags may repeat it, and change rotary positions and context. `base`: that model."""
    if args.load_hf is None:
        return
    if args.model is not None:
        _refuse("model", args.model, f"contradicts --load-hf {args.load_hf}, whose config.json gives the model", {"model": None})
    for name in FIXED_BY_WEIGHTS:
        given, fixed = getattr(args, name), getattr(base, name)
        if given is not None and given != fixed:
            _refuse(name, given, f"contradicts --load-hf {args.load_hf}, where it is {fixed}", {name: None})
    if args.init_method_std is not None:
        _refuse("init_method_std", args.init_method_std, "means nothing with --load-hf, which gives the weights",
                {"init_method_std": None})  # fmt: skip


def check_rope_scaling(args: argparse.Namespace, base: ModelConfig) -> None:
    """Factors belong to the scaling type in force and are in order. `base`: the preset, before overrides."""
    kind = args.rope_scaling_type or (base.rope_scaling.type if base.rope_scaling else "none")
    foreign = {"none": ANY_SCALING + LLAMA3_ONLY + YARN_ONLY, "llama3": YARN_ONLY, "yarn": LLAMA3_ONLY}[kind]
    given = [name for name in foreign if getattr(args, name) is not None]
    if given:
        _refuse(given[0], getattr(args, given[0]), f"means nothing with --rope-scaling-type {kind}", dict.fromkeys(given))
    if kind == "none":
        return
    inherited = base.rope_scaling if base.rope_scaling is not None and base.rope_scaling.type == kind else RopeScaling
    if kind == "yarn" and inherited is RopeScaling and args.rope_scaling_factor is None:
        original = args.rope_original_max_position_embeddings or base.max_position_embeddings
        factor = max(2, math.ceil(args.seq_length / original))
        reason = f"needs --rope-scaling-factor: --seq-length {args.seq_length} over the original {original} tokens"
        _refuse("rope_scaling_type", "yarn", reason, {"rope_scaling_factor": float(factor)})

    def in_force(name, field):
        return getattr(inherited, field) if getattr(args, name) is None else getattr(args, name)

    low, high = in_force("rope_low_freq_factor", "low_freq_factor"), in_force("rope_high_freq_factor", "high_freq_factor")
    if kind == "llama3" and not low < high:
        fix = {"rope_low_freq_factor": high / 4} if args.rope_low_freq_factor else {"rope_high_freq_factor": 4 * low}
        _refuse("rope_low_freq_factor", low, f"is not below --rope-high-freq-factor {high:g}", fix)
    slow, fast = in_force("rope_beta_slow", "beta_slow"), in_force("rope_beta_fast", "beta_fast")
    if kind == "yarn" and not slow <= fast:
        fix = {"rope_beta_slow": fast / 32} if args.rope_beta_slow else {"rope_beta_fast": 32 * slow}
        _refuse("rope_beta_slow", slow, f"is above --rope-beta-fast {fast:g}", fix)


def check_model(args: argparse.Namespace, config: ModelConfig) -> None:
    """The heads share their key/value heads evenly and have pairs to turn."""
    heads, groups, context = config.num_attention_heads, config.num_query_groups, args.context_parallel_size
    if heads % groups:
        fitting = [count for count in range(1, heads + 1) if heads % count == 0 and kv_heads_fit(count, context)]
        _refuse("num_query_groups", groups, f"does not divide --num-attention-heads {heads}",
                *_values("num_query_groups", _nearest(groups, fitting)))  # fmt: skip
    if config.kv_channels % 2:
        _refuse("kv_channels", config.kv_channels, "is odd, but rotary positions turn pairs of channels",
                {"kv_channels": config.kv_channels + 1})  # fmt: skip


def check_parallel(args: argparse.Namespace, config: ModelConfig, world_size: int) -> None:
    """Context parallelism fits the ranks and the heads; a stage has the same heads on every rank."""
    heads, groups, context = config.num_attention_heads, config.num_query_groups, args.context_parallel_size
    if args.pipeline_model_parallel_size != 1:
        reason = "is not possible: pipeline parallelism is not built yet, all ranks go to context and data parallelism"
        _refuse("pipeline_model_parallel_size", args.pipeline_model_parallel_size, reason, {"pipeline_model_parallel_size": 1})

    reason = None
    if world_size % context:
        reason = f"does not divide the number of ranks {world_size}"
    elif heads % context:
        reason = f"does not divide --num-attention-heads {heads}"
    elif not kv_heads_fit(groups, context):
        reason = f"neither divides nor is a multiple of --num-query-groups {groups}"
    if reason:
        fitting = _fitting_context_sizes(args, config, world_size)
        _refuse("context_parallel_size", context, reason, *_values("context_parallel_size", _nearest(context, fitting)))

    in_stage = args.upipe_heads_per_stage
    if not in_stage:
        return
    legal = legal_heads_per_stage(heads, context)
    if args.cp_comm_type == "a2a" and in_stage != heads:
        fixes = [{"upipe_heads_per_stage": None}] + ([{"cp_comm_type": "upipe"}] if in_stage in legal else [])
        _refuse("upipe_heads_per_stage", in_stage, f"contradicts --cp-comm-type a2a, which moves all {heads} heads at once",
                *fixes)  # fmt: skip
    if in_stage not in legal:
        reason = (
            f"is not a multiple of --context-parallel-size {context}"
            if in_stage % context
            else f"does not divide --num-attention-heads {heads}"
        )
        _refuse("upipe_heads_per_stage", in_stage, reason, *_values("upipe_heads_per_stage", _nearest(in_stage, legal)))


def _fitting_context_sizes(args, config, world_size) -> list[int]:
    """Context sizes that fit ranks, heads, stage and sequence; of those the ones that fit the global batch, if any does."""
    heads, groups, tokens = config.num_attention_heads, config.num_query_groups, args.seq_length * args.micro_batch_size
    stage = args.upipe_heads_per_stage or heads
    fitting = [
        size
        for size in legal_ulysses_degrees(heads, groups)
        if world_size % size == 0 and stage % size == 0 and tokens % size == 0
    ]
    batch = args.global_batch_size or 0
    return [size for size in fitting if batch % (args.micro_batch_size * (world_size // size)) == 0] or fitting


def check_batch(args: argparse.Namespace, world_size: int) -> None:
    """Ranks hold equally many tokens; a step is a whole number of micro-batches on every rank; it can run as asked."""
    context, micro = args.context_parallel_size, args.micro_batch_size
    if args.seq_length * micro % context:
        step = context // math.gcd(context, micro)
        reason = f"times --micro-batch-size {micro} is not a multiple of --context-parallel-size {context}"
        _refuse("seq_length", args.seq_length, reason, *_values("seq_length", _multiples_around(args.seq_length, step)))
    chunk, tile = args.upipe_query_chunk, args.mlp_tile_size
    if chunk and chunk % tile:
        _refuse("upipe_query_chunk", chunk, f"is not a multiple of --mlp-tile-size {tile}",
                *_values("upipe_query_chunk", _multiples_around(chunk, tile)))  # fmt: skip
    if chunk and args.attention_backend == "cudnn":
        _refuse("attention_backend", "cudnn", "cannot serve --upipe-query-chunk: its causal mask begins at the first key",
                {"attention_backend": "auto"}, {"upipe_query_chunk": None})  # fmt: skip
    data = world_size // context
    if args.global_batch_size and args.global_batch_size % (micro * data):
        reason = f"is not a multiple of --micro-batch-size {micro} x data-parallel size {data}"
        _refuse("global_batch_size", args.global_batch_size, reason,
                *_values("global_batch_size", _multiples_around(args.global_batch_size, micro * data)))  # fmt: skip
    if args.bf16 and args.fp32:
        raise ArgumentError("--bf16 and --fp32 contradict each other; one of the two works",
                            ({"fp32": False}, {"bf16": False}))  # fmt: skip
    if args.device == "cpu" and args.attention_backend in CUDA_BACKENDS:
        _refuse("attention_backend", args.attention_backend, "needs --device cuda",
                *_values("attention_backend", ["auto", "torch", "reference"]))  # fmt: skip


def check_memory(args: argparse.Namespace) -> None:
    """Activations on disk have a directory."""
    directory = {"disk_offload_dir": "/tmp"}
    if args.recompute_granularity == "none" and args.activation_memory not in ("auto", "gpu"):
        _refuse("recompute_granularity", "none", f"keeps all on the GPU, and --activation-memory {args.activation_memory} does not",
                {"recompute_granularity": "selective"}, {"activation_memory": "gpu"})  # fmt: skip
    if args.activation_memory == "disk" and not args.disk_offload_dir:
        reason = "needs --disk-offload-dir, a directory on a fast local disk"
        _refuse("activation_memory", "disk", reason, directory, {"activation_memory": "host"})
    if args.disk_memory_gib is not None and not args.disk_offload_dir:
        _refuse("disk_memory_gib", args.disk_memory_gib, "needs --disk-offload-dir", directory, {"disk_memory_gib": None})


def check_schedule(args: argparse.Namespace) -> None:
    """Warm-up, decay and end of the run come in this order, and the learning rate does not end above its start."""
    if args.min_lr > args.lr:
        _refuse("min_lr", args.min_lr, f"is above --lr {args.lr:g}", {"min_lr": float(f"{args.lr / 10:.3g}")})
    limit, limit_flag = args.train_iters, "--train-iters"
    if args.lr_decay_style != "constant" and args.lr_decay_iters and args.lr_decay_iters < limit:
        limit, limit_flag = args.lr_decay_iters, "--lr-decay-iters"
    if args.lr_warmup_iters >= limit:
        _refuse("lr_warmup_iters", args.lr_warmup_iters, f"is not below {limit_flag} {limit}",
                {"lr_warmup_iters": limit // 10})  # fmt: skip
    if not args.lr_wsd_decay_iters:
        return
    if args.lr_decay_style != "WSD":
        _refuse("lr_wsd_decay_iters", args.lr_wsd_decay_iters, f"means nothing with --lr-decay-style {args.lr_decay_style}",
                {"lr_wsd_decay_iters": None})  # fmt: skip
    room = (args.lr_decay_iters or args.train_iters) - args.lr_warmup_iters
    if args.lr_wsd_decay_iters > room:
        _refuse("lr_wsd_decay_iters", args.lr_wsd_decay_iters, f"is more than the {room} steps after the warm-up",
                {"lr_wsd_decay_iters": room})  # fmt: skip


def check_data(args: argparse.Namespace) -> None:
    """One source of tokens, well formed, and the tokenizer that made it."""
    splits = tuple(_values("split", ["969,30,1", "1,0,0"]))
    try:
        train_share, _, _ = parse_split(args.split)
    except DatasetError as error:
        raise ArgumentError(str(error), splits) from None
    if train_share == 0:
        _refuse("split", args.split, "leaves nothing to train on", *splits)
    sources = {"mock_data": False, "data_path": None, "train_data_path": None}  # and what each is when left out
    given = [name for name in sources if getattr(args, name)]
    if len(given) > 1:
        keep_one = [{name: sources[name] for name in given if name != kept} for kept in given]
        raise ArgumentError(f"{' and '.join(map(_flag, given))} contradict each other; one of them works", tuple(keep_one))
    if args.balance_batches and args.attention_mask == "causal":
        _refuse("attention_mask", "causal", "gives every sequence the same work, so --balance-batches has nothing to balance",
                {"balance_batches": False})  # fmt: skip
    for name in ("valid_data_path", "test_data_path"):
        if getattr(args, name) and not args.train_data_path:
            _refuse(name, " ".join(getattr(args, name)), "needs --train-data-path; --data-path is divided by --split", {name: None})
    if args.mock_data:
        return
    if not given:
        raise ArgumentError("nothing to train on: --data-path PREFIX or, to try out, --mock-data works",
                            ({"mock_data": True},))  # fmt: skip
    for name in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        if getattr(args, name):
            _check_data_path(name, getattr(args, name))
    if args.tokenizer_type is None and not args.tokenizer_model:
        raise ArgumentError(f"{_flag(given[0])} needs the --tokenizer-model that made it; for bytes --tokenizer-type Byte works",
                            ({"tokenizer_type": "Byte"},))  # fmt: skip
    if args.tokenizer_type not in (None, "Byte") and not args.tokenizer_model:
        file = "tokenizer.json" if args.tokenizer_type == "HuggingFace" else "tokenizer.model"
        _refuse("tokenizer_type", args.tokenizer_type, "needs --tokenizer-model FILE, the one the data was made with",
                {"tokenizer_model": file})  # fmt: skip


def check_evaluation(args: argparse.Namespace) -> None:
    """There is validation data when evaluation is on, and evaluation when there is data for nothing else."""
    interval = args.eval_interval
    for name in ("valid_data_path", "test_data_path"):
        if getattr(args, name) and not interval:
            _refuse(name, " ".join(getattr(args, name)), "is for evaluation, which is off",
                    {"eval_interval": max(1, args.train_iters // 10)}, {name: None})  # fmt: skip
    if not interval or args.mock_data:
        return
    if args.train_data_path and not args.valid_data_path:
        _refuse("eval_interval", interval, "needs --valid-data-path beside --train-data-path", {"eval_interval": None})
    if args.data_path and parse_split(args.split)[1] == 0:
        _refuse("eval_interval", interval, f"has nothing to evaluate: --split {args.split} leaves nothing for validation",
                {"split": "969,30,1"}, {"eval_interval": None})  # fmt: skip


def _check_data_path(name: str, words: list[str]) -> None:
    try:
        parse_data_path(words, _flag(name))
    except DatasetError as error:
        paths = [word for word in words if not _is_number(word)] or words
        blend = paths if len(paths) == 1 else [word for path in paths for word in ("1", path)]
        raise ArgumentError(f"{error}; {_setting(name, blend)} works", ({name: blend},)) from None


def check_state(args: argparse.Namespace) -> None:
    if args.save_interval and not args.save:
        _refuse("save_interval", args.save_interval, "needs --save DIR", {"save": "checkpoints"}, {"save_interval": None})
    for name, absent in (("finetune", False), ("no_load_optim", False), ("ckpt_step", None)):
        if getattr(args, name) != absent and args.load is None:
            raise ArgumentError(f"{_setting(name, getattr(args, name))} needs --load DIR; --load checkpoints or without "
                                f"{_flag(name)} works", ({"load": "checkpoints"}, {name: absent}))  # fmt: skip
        if getattr(args, name) != absent and args.pretrained_checkpoint is not None:
            _refuse("pretrained_checkpoint", args.pretrained_checkpoint, f"and {_flag(name)} contradict each other: the same command is to "
                    "start from there and later to go on from --load",
                    {name: absent}, {"pretrained_checkpoint": None})  # fmt: skip
    if args.pretrained_checkpoint is not None and args.load_hf is not None:
        _refuse("pretrained_checkpoint", args.pretrained_checkpoint, f"and --load-hf {args.load_hf} are two starts; one of them works",
                {"load_hf": None}, {"pretrained_checkpoint": None})  # fmt: skip


def check_profiling(args: argparse.Namespace, world_size: int) -> None:
    """A profile has a place, steps that the run reaches, and ranks that there are."""
    if not args.profile:
        for name in ("profile_step_end", "profile_step_start", "profile_ranks", "profile_dir"):
            if getattr(args, name) is not None:
                place = {} if args.profile_dir or args.tensorboard_dir else {"profile_dir": "profiles"}
                _refuse(name, _text(getattr(args, name)), "needs --profile", {"profile": True} | place, {name: None})
        return
    if not args.profile_dir and not args.tensorboard_dir:
        raise ArgumentError("--profile needs --profile-dir or --tensorboard-dir; --profile-dir profiles works",
                            ({"profile_dir": "profiles"},))  # fmt: skip
    start, stop = args.profile_step_start, args.profile_step_end
    if start is not None and start > args.train_iters:
        _refuse("profile_step_start", start, f"is after the last step, --train-iters {args.train_iters}",
                {"profile_step_start": args.train_iters})  # fmt: skip
    if stop is not None and start is None:
        _refuse("profile_step_end", stop, "needs --profile-step-start", {"profile_step_start": 1}, {"profile_step_end": None})
    if stop is not None and stop <= start:
        _refuse("profile_step_end", stop, f"is not above --profile-step-start {start}", {"profile_step_end": start + 1})
    if args.profile_ranks is None:
        return
    absent = [rank for rank in args.profile_ranks if rank >= world_size]
    if absent:
        _refuse("profile_ranks", absent[0], f"is none of the {world_size} ranks", {"profile_ranks": [0]})
    if args.rehearse_world_size and args.rehearse_rank not in args.profile_ranks:
        _refuse("profile_ranks", args.profile_ranks[0], f"is not the one rehearsed, --rehearse-rank {args.rehearse_rank}",
                {"profile_ranks": [args.rehearse_rank]}, {"rehearse_rank": args.profile_ranks[0]})  # fmt: skip


def check_rehearsal(args: argparse.Namespace) -> None:
    """A rehearsal has its own report, trains nothing that is worth keeping, and is asked for by the size of its job."""
    ranks = args.rehearse_world_size
    if ranks is None:
        for name, default in (("rehearse_rank", 0), ("rehearse_attention", "real"), ("rehearse_layers", None),
                              ("rehearse_json", None)):  # fmt: skip
            if getattr(args, name) != default:
                _refuse(name, getattr(args, name), "needs --rehearse-world-size", {"rehearse_world_size": 8}, {name: default})
        return
    if args.rehearse_rank >= ranks:
        _refuse("rehearse_rank", args.rehearse_rank, f"is none of the ranks of --rehearse-world-size {ranks}",
                {"rehearse_rank": ranks - 1})  # fmt: skip
    for name in ("dry_run", "load", "save", "save_interval", "exit_interval", "exit_duration_in_mins", "eval_interval",
                 "tensorboard_dir", "log_jsonl"):  # fmt: skip
        if getattr(args, name):
            _refuse("rehearse_world_size", ranks, f"rehearses a few steps and keeps nothing, so {_flag(name)} means nothing",
                    {name: False if name == "dry_run" else None})  # fmt: skip


def check_rehearsed_layers(args: argparse.Namespace, config: ModelConfig) -> None:
    """Layers that compute are some of the model's. Which they are, and whether they are enough, depends on the plans."""
    if (args.rehearse_layers or 0) > config.num_layers:
        _refuse("rehearse_layers", args.rehearse_layers, f"is more than the {config.num_layers} layers of --num-layers",
                {"rehearse_layers": config.num_layers}, {"rehearse_layers": None})  # fmt: skip


def check_vocab_size(config: ModelConfig, tokenizer_vocab_size: int) -> None:
    """Every token id has a row of the embedding. For once the tokenizer is loaded."""
    if config.vocab_size < tokenizer_vocab_size:
        _refuse("vocab_size", config.vocab_size, f"is smaller than the tokenizer's {tokenizer_vocab_size} ids",
                {"vocab_size": -(-tokenizer_vocab_size // 128) * 128})  # fmt: skip


def long_context_notes(args: argparse.Namespace, config: ModelConfig) -> list[str]:
    """A line for the person when positions pass what the model is made for: right from scratch, rarely for a loaded model."""
    scaling, reach = config.rope_scaling, config.max_position_embeddings
    if scaling is not None:
        reach = max(reach, int(scaling.factor * scaling.original_max_position_embeddings))
    if args.seq_length <= reach:
        return []
    original = scaling.original_max_position_embeddings if scaling else reach
    note = (
        f"--seq-length {args.seq_length} is longer than the {reach} positions the model is made for; to stretch a "
        f"pre-trained one: --rope-scaling-type yarn --rope-original-max-position-embeddings {original} "
        f"--rope-scaling-factor {math.ceil(args.seq_length / original)}"
    )
    return [note]


def _refuse(name: str, value, reason: str, *fixes: dict) -> None:
    """Raise for the flag `name`. Fixes that change the flag itself are shown as bare values."""
    own = all(list(fix) == [name] and fix[name] is not None for fix in fixes)
    shown = [_text(fix[name]) if own else " ".join(map(_setting, fix, fix.values())) for fix in fixes]
    value = f"{value:g}" if isinstance(value, float) else value
    raise ArgumentError(f"{_flag(name)} {value} {reason}; {' or '.join(shown)} works", fixes)


def _setting(name: str, value) -> str:
    if value is None or value is False:
        return f"without {_flag(name)}"
    return _flag(name) if value is True else f"{_flag(name)} {_text(value)}"


def _text(value) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _values(name: str, values) -> list[dict]:
    return [{name: value} for value in values]


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _nearest(value: int, candidates: list[int]) -> list[int]:
    """The largest candidate up to `value` and the smallest above it; `candidates` ascend."""
    return [c for c in candidates if c <= value][-1:] + [c for c in candidates if c > value][:1]


def _multiples_around(value: int, step: int) -> list[int]:
    down = value // step * step
    return [down, down + step] if down else [step]
