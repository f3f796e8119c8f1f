"""The output head's cross-entropy on a GPU, both implementations, against float64."""

import pytest
import torch

from megacp.kernels.cross_entropy import IGNORE_INDEX
from megacp.kernels.linear_cross_entropy import check_implementation, linear_cross_entropy

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def serving(implementation):
    try:
        check_implementation(implementation, DEVICE, BF16, 128256, 4096, 4096)
    except ValueError as refused:
        pytest.skip(str(refused))


def head(tokens, vocab, hidden, spread=1.0, seed=0):
    """Logits have a standard deviation of `spread`."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    y_td, weight_Vd = (torch.randn(rows, hidden, generator=generator, device=DEVICE) for rows in (tokens, vocab))
    labels_t = torch.randint(vocab, (tokens,), generator=generator, device=DEVICE)
    return y_td.to(BF16), (weight_Vd * (spread * hidden**-0.5)).to(BF16), labels_t


def exact(y_td, weight_Vd, labels_t, grad_scale):
    y, w = (x.double().requires_grad_() for x in (y_td, weight_Vd))
    loss_t = torch.nn.functional.cross_entropy(y @ w.t(), labels_t, reduction="none", ignore_index=IGNORE_INDEX)
    (loss_t.sum() * grad_scale).backward()
    return loss_t.detach(), y.grad, w.grad


def run(implementation, y_td, weight_Vd, labels_t, grad_scale, tile):
    dweight_Vd = torch.full(weight_Vd.shape, float("nan"), device=DEVICE)
    parts = []
    for start in range(0, len(y_td), tile):
        rows = slice(start, start + tile)
        parts.append(linear_cross_entropy(y_td[rows], weight_Vd, labels_t[rows], grad_scale, dweight_Vd, start == 0, implementation))
    return torch.cat([loss for loss, _ in parts]), torch.cat([dy for _, dy in parts]), dweight_Vd


def error(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("implementation", ["native", "quack"])
@pytest.mark.parametrize(
    "tokens, vocab, hidden, tile, spread",
    [
        (512, 4096, 512, 512, 1), (512, 4096, 512, 256, 1),  # tokens as many as columns; two tiles
        (300, 1536, 256, 128, 1),  # a last tile of 44 tokens, which quack leaves to the native way
        (1129, 1536, 256, 1001, 1),  # and a last one that it takes, whose labels begin anywhere in memory
        (640, 18688, 576, 256, 1), (256, 19200, 2560, 256, 6),  # tiles of 128 words, columns of 192; of 192, columns of 256
        (384, 32000, 1024, 384, 30),  # most of a row near nothing
        (256, 384, 64, 256, 0.01),
    ],
)  # fmt: skip
def test_loss_and_gradients_against_float64(implementation, tokens, vocab, hidden, tile, spread):
    serving(implementation)
    y_td, weight_Vd, labels_t = head(tokens, vocab, hidden, spread)
    labels_t[3::7] = IGNORE_INDEX
    grad_scale = 1 / 333
    loss64, dy64, dw64 = exact(y_td, weight_Vd, labels_t, grad_scale)
    loss, dy, dw = run(implementation, y_td, weight_Vd, labels_t, grad_scale, tile)
    # Factors are rounded to bf16 twice, each by 2^-9 at most and 2^-10.8 in the mean; dy once more. The native way's logits are
    # rounded before an exponential, so by the size of the logits.
    bound = 2**-8 if implementation == "quack" else 2**-8 * max(1, spread)
    assert error(dy, dy64) < bound and error(dw, dw64) < bound, (error(dy, dy64), error(dw, dw64))
    # Tensor cores cut what they add 16 products at a time off at 2^-23; a native logit is rounded to 2^-9 besides.
    fused = implementation == "quack" and tile % 128 == 0 and tokens % tile == 0
    assert error(loss, loss64) < (2e-6 + hidden / 16 * 2**-23 if fused else 2**-8)
    assert loss.dtype == dw.dtype == torch.float32 and dy.dtype == BF16
    assert not loss[3::7].any() and not dy[3::7].any()


@pytest.mark.parametrize("implementation", ["native", "quack"])
def test_all_masked_gives_zeros(implementation):
    serving(implementation)
    y_td, weight_Vd, labels_t = head(256, 1536, 256)
    for result in run(implementation, y_td, weight_Vd, torch.full_like(labels_t, IGNORE_INDEX), 0.1, 128):
        assert not result.any()


@pytest.mark.parametrize("implementation", ["native", "quack"])
def test_a_label_out_of_range_gives_nan_for_its_token_alone(implementation):
    serving(implementation)
    y_td, weight_Vd, labels_t = head(256, 1536, 256)
    labels_t[5], labels_t[200] = 1536, 2**40
    loss, dy, _ = run(implementation, y_td, weight_Vd, labels_t, 0.1, 256)
    wrong = torch.zeros(256, dtype=torch.bool, device=DEVICE)
    wrong[5] = wrong[200] = True
    assert torch.equal(loss.isnan(), wrong) and torch.equal(dy.isnan().all(1), wrong) and torch.equal(dy.isnan().any(1), wrong)


def test_quack_gives_the_same_bits_each_time():
    serving("quack")
    case = head(512, 19200, 1024, 3)
    once, again = (run("quack", *case, 0.01, 128) for _ in range(2))
    for a, b in zip(once, again):
        assert torch.equal(a, b)


def test_exponentials_past_2_to_the_31_elements():
    """Llama3's vocabulary, 16,896 tokens in one tile: as in small tiles, but for the sums over tokens, cut off 16 tokens at a time."""
    serving("quack")
    y_td, weight_Vd, labels_t = head(16896, 128256, 256)
    assert y_td.shape[0] * weight_Vd.shape[0] > 2**31
    loss, dy, dw = run("quack", y_td, weight_Vd, labels_t, 1e-3, 16896)
    loss_small, dy_small, dw_small = run("quack", y_td, weight_Vd, labels_t, 1e-3, 1408)
    assert torch.equal(loss, loss_small) and torch.equal(dy, dy_small)
    assert error(dw, dw_small.double()) < 16896 / 16 * 2**-23
