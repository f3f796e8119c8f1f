"""The head's products and cross-entropy against autograd in float64; which implementation is taken, and what a refusal says."""

import pytest
import torch

from megacp.kernels import linear_cross_entropy as module
from megacp.kernels.cross_entropy import IGNORE_INDEX
from megacp.kernels.linear_cross_entropy import linear_cross_entropy, select_implementation

TOLERANCE = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 2**-7}
GPU = torch.device("cuda", 0)


def head(dtype, tokens=12, vocab=37, hidden=8):
    generator = torch.Generator().manual_seed(5)
    y_td, weight_Vd = (torch.randn(rows, hidden, generator=generator, dtype=torch.float64).to(dtype) for rows in (tokens, vocab))
    labels_t = torch.randint(vocab, (tokens,), generator=generator)
    labels_t[1::4] = IGNORE_INDEX
    return y_td, weight_Vd, labels_t


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_two_tiles_give_losses_and_gradients_of_one_stream(dtype):
    y_td, weight_Vd, labels_t = head(dtype)
    exact_y, exact_w = (x.double().requires_grad_() for x in (y_td, weight_Vd))
    exact_t = torch.nn.functional.cross_entropy(exact_y @ exact_w.t(), labels_t, reduction="none", ignore_index=IGNORE_INDEX)
    (exact_t.sum() * 0.25).backward()

    wide = torch.float64 if dtype == torch.float64 else torch.float32
    dweight_Vd = torch.full(weight_Vd.shape, float("nan"), dtype=wide)  # what the first tile overwrites
    parts = [
        linear_cross_entropy(y_td[tile], weight_Vd, labels_t[tile], 0.25, dweight_Vd, first=tile.start == 0)
        for tile in (slice(0, 7), slice(7, 12))
    ]
    for ours, exact in [
        (torch.cat([loss_t for loss_t, _ in parts]), exact_t), (torch.cat([dy_td for _, dy_td in parts]), exact_y.grad),
        (dweight_Vd, exact_w.grad),
    ]:  # fmt: skip
        assert ((ours.double() - exact).norm() / exact.norm()).item() < TOLERANCE[dtype]
    assert dweight_Vd.dtype == wide and parts[0][1].dtype == dtype


@pytest.mark.parametrize(
    "change, words",
    [
        ({"device": torch.device("cpu")}, "CUDA device, not cpu"),
        ({"capability": (8, 0)}, "for Hopper"),
        ({"dtype": torch.float32}, "float32: it takes bfloat16"),
        ({"vocab": 32001}, "vocabulary 32,001: it takes multiples of 128, such as --vocab-size 32128"),
        ({"hidden": 4100}, "hidden size 4100: it takes multiples of 8"),
        ({"tile": 1000}, "--loss-tile-size 1000: it takes multiples of 128, such as 1024"),
        ({"error": "the package quack-kernels is not installed"}, "quack-kernels is not installed"),
    ],
)
def test_what_quack_cannot_serve_is_refused_by_name_and_passed_over_by_auto(change, words, monkeypatch):
    setting = {"device": GPU, "dtype": torch.bfloat16, "vocab": 128256, "hidden": 4096, "tile": 4096, "capability": (9, 0), "error": None}
    setting |= change
    monkeypatch.setattr(module, "compute_capability", lambda device: setting["capability"])
    monkeypatch.setattr(module, "device_name", str)
    monkeypatch.setattr(module, "_quack_error", lambda: setting["error"])
    sizes = setting["device"], setting["dtype"], setting["vocab"], setting["hidden"], setting["tile"]
    choice = select_implementation("auto", *sizes)
    assert choice.name == "native" and words in choice.reason
    with pytest.raises(ValueError, match="--cross-entropy-fusion-impl quack cannot serve") as refused:
        select_implementation("quack", *sizes)
    assert words in str(refused.value)
    assert select_implementation("native", *sizes).name == "native"


def test_auto_takes_quack_for_a_large_head_and_a_small_one_only_on_request(monkeypatch):
    monkeypatch.setattr(module, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "device_name", str)
    monkeypatch.setattr(module, "_quack_error", lambda: None)
    assert select_implementation("auto", GPU, torch.bfloat16, 128256, 2048, 4096).name == "quack"
    small = select_implementation("auto", GPU, torch.bfloat16, 4096, 256, 4096)
    assert small.name == "native" and "too small" in small.reason
    assert select_implementation("quack", GPU, torch.bfloat16, 4096, 256, 4096).name == "quack"


@pytest.mark.parametrize("version, words", [("0.5.9", "quack-kernels 0.5.9: it is put together for 0.6.*"), (None, "not installed")])
def test_another_version_of_quack_is_not_taken(version, words, monkeypatch):
    def installed(name):
        if version is None:
            raise module.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(module.metadata, "version", installed)
    module._quack_error.cache_clear()
    try:
        assert words in module._quack_error()
    finally:
        module._quack_error.cache_clear()


def test_a_predicted_tile_takes_the_scratch_of_quack():
    """On the meta device in bf16, as a plan for GPUs counts it; 200 tokens are no multiple of 128 and take the native way."""
    weight_Vd = torch.empty(384, 64, dtype=torch.bfloat16, device="meta")
    seen = []
    original = module.Scratch.like
    try:
        module.Scratch.like = classmethod(lambda cls, y_td, vocab: seen.append((len(y_td), vocab)) or original(y_td, vocab))
        for tokens in (256, 200):
            y_td = torch.empty(tokens, 64, dtype=torch.bfloat16, device="meta")
            labels_t = torch.empty(tokens, dtype=torch.int64, device="meta")
            linear_cross_entropy(y_td, weight_Vd, labels_t, 1.0, torch.empty(384, 64, device="meta"), first=True)
    finally:
        module.Scratch.like = original
    assert seen == [(256, 384)]
