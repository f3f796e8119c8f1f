"""The head's products and cross-entropy against autograd in float64; which implementation is taken, and what a refusal says."""

import pytest
import torch

from megacp.kernels import linear_cross_entropy as module
from megacp.kernels.cross_entropy import IGNORE_INDEX
from megacp.kernels.linear_cross_entropy import check_implementation, linear_cross_entropy

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


SETTING = {"device": GPU, "dtype": torch.bfloat16, "vocab": 128256, "hidden": 4096, "tile_size": 4096}


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(module, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(module, "_quack_error", lambda: None)
    return monkeypatch


@pytest.mark.parametrize(
    "change, words",
    [
        ({"device": torch.device("cpu")}, "a CUDA device, not cpu"),
        ({"dtype": torch.float32}, "float32: it takes bfloat16"),
        ({"vocab": 32001}, "vocabulary 32,001: it takes multiples of 128, such as --vocab-size 32128"),
        ({"hidden": 4100}, "hidden size 4100: it takes multiples of 8"),
        ({"tile_size": 1000}, "--loss-tile-size 1000: it takes multiples of 128, such as 1024"),
    ],
)
@pytest.mark.usefixtures("on_hopper")
def test_what_quack_cannot_serve_is_refused_by_name(change, words):
    check_implementation("quack", **SETTING)
    check_implementation("native", **SETTING | change)
    with pytest.raises(ValueError, match="--cross-entropy-fusion-impl quack cannot serve") as refused:
        check_implementation("quack", **SETTING | change)
    assert words in str(refused.value) and str(refused.value).endswith("; native can")


def test_another_gpu_or_a_package_that_is_not_there_is_named(on_hopper):
    on_hopper.setattr(module, "_quack_error", lambda: "ImportError: no such part")
    with pytest.raises(ValueError, match="ImportError: no such part"):
        check_implementation("quack", **SETTING)
    on_hopper.setattr(module, "compute_capability", lambda device: (10, 0))
    with pytest.raises(ValueError, match="for Hopper"):
        check_implementation("quack", **SETTING)


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


def test_a_plan_counts_the_scratch_of_quack_for_the_tiles_that_it_takes(monkeypatch):
    """In bf16 on the meta device. 200 tokens are no multiple of 128."""
    seen, original = [], module.Scratch.like
    monkeypatch.setattr(module.Scratch, "like", lambda y_td, vocab: seen.append((len(y_td), vocab)) or original(y_td, vocab))
    weight_Vd, dweight_Vd = (torch.empty(384, 64, dtype=dtype, device="meta") for dtype in (torch.bfloat16, torch.float32))
    for implementation, tokens in (("quack", 256), ("quack", 200), ("native", 256)):
        y_td = torch.empty(tokens, 64, dtype=torch.bfloat16, device="meta")
        labels_t = torch.empty(tokens, dtype=torch.int64, device="meta")
        linear_cross_entropy(y_td, weight_Vd, labels_t, 1.0, dweight_Vd, True, implementation)
    assert seen == [(256, 384)]
