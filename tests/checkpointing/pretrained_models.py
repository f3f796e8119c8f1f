"""Tiny random models in the folders that transformers writes, to import, export and compare with.

No two widths of a model agree, heads share KV heads, norms are not the ones that they are born as, and the scalings act within the
few hundred tokens of a test: a swapped weight or a dropped scaling shows.
"""

import pytest
import torch

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()

LLAMA3 = dict(rope_type="llama3", factor=8.0, original_max_position_embeddings=64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=128, beta_fast=4.0, beta_slow=1.0)
DEFAULT = dict(rope_type="default")
# Name: (family, tied embeddings, scaling). Qwen3's heads are wider than hidden size / heads: 8 x 16 over 48.
MODELS = {
    "llama, llama3 scaling": ("Llama", False, LLAMA3),
    "llama, yarn, tied": ("Llama", True, YARN),
    "qwen3": ("Qwen3", False, DEFAULT),
    "qwen3, yarn, tied": ("Qwen3", True, YARN),
}
VOCABULARY = 199


def hugging_face_model(family="Llama", tied=False, rope=LLAMA3, std=0.2, dtype=torch.float32, seed=3, **changes):
    """A random model of transformers, in evaluation mode."""
    fields = dict(
        vocab_size=VOCABULARY, hidden_size=48, intermediate_size=80, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, head_dim=16 if family == "Qwen3" else 6, max_position_embeddings=512, rms_norm_eps=1e-6,
        tie_word_embeddings=tied, rope_parameters=dict(rope, rope_theta=10000.0), initializer_range=std, bos_token_id=1,
        eos_token_id=2, attn_implementation="eager",
    )  # fmt: skip
    config = getattr(transformers, f"{family}Config")(**fields | changes)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim == 1:
                    parameter.uniform_(0.5, 1.5)
    return model.to(dtype).eval()


def save_model(directory, *args, max_shard_size="5GB", **kwargs):
    """Saves `hugging_face_model(...)`, and something like a tokenizer beside it; returns the model."""
    model = hugging_face_model(*args, **kwargs)
    model.save_pretrained(directory, max_shard_size=max_shard_size)
    (directory / "tokenizer.json").write_text('{"version": "1.0"}')
    return model


def reload(directory, dtype=torch.float32):
    """The folder as transformers reads it."""
    return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
