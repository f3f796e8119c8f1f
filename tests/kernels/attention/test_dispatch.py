"""The choice of backend, on this machine and on GPUs that are only described to it."""

import pytest
import torch

from megacp.kernels.attention import Documents, probe, select_backend
from megacp.kernels.attention.dispatch import BACKENDS

LONG, SHORT = Documents((0, 2**20)), Documents(tuple(range(0, 2**20 + 1, 1024)))


@pytest.fixture
def gpu(monkeypatch):
    """gpu((9, 0), "fa4", ...): a CUDA device of that capability with those packages installed."""
    def describe(capability, *installed, cudnn_version=91900):
        modules = {BACKENDS[name].MODULE for name in installed}
        monkeypatch.setattr(probe, "compute_capability", lambda device: capability)
        monkeypatch.setattr(probe, "device_name", lambda device: f"GPU {capability}")
        monkeypatch.setattr(probe, "cudnn_version", lambda: cudnn_version)
        monkeypatch.setattr(probe, "import_error", lambda module: None if module in modules else f"No module named '{module}'")
        return torch.device("cuda")
    return describe


def choose(device, dtype=torch.bfloat16, documents=LONG, requested="auto", head_dim=128, deterministic=False):
    return select_backend(requested, device, dtype, head_dim, 4, 1, documents, deterministic=deterministic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_cpu_takes_torch(dtype):
    choice = choose("cpu", dtype)
    assert choice.name == "torch" and "not fa4: it needs a CUDA device" in choice.reason


@pytest.mark.parametrize("capability,installed,documents,expected", [
    ((9, 0), ("fa4", "fa3"), SHORT, "fa4"),
    ((10, 0), ("fa4",), LONG, "fa4"),
    ((9, 0), ("fa3",), SHORT, "fa3"),
    ((10, 0), ("fa3",), LONG, "cudnn"),  # FlashAttention-3 is Hopper's
    ((9, 0), (), LONG, "cudnn"),
    ((9, 0), (), SHORT, "torch"),
    ((9, 0), (), Documents((0, 1000, 2**20)), "cudnn"),  # the long one has nearly all the work
    ((8, 0), ("fa4", "fa2"), SHORT, "torch"),
    ((7, 5), ("fa4", "fa2"), LONG, "reference"),
])
def test_auto_on_gpus(gpu, capability, installed, documents, expected):
    assert choose(gpu(capability, *installed), documents=documents).name == expected


def test_auto_explains_what_it_passed_over(gpu):
    reason = choose(gpu((9, 0)), documents=SHORT).reason
    assert "not fa4: No module named 'flash_attn.cute.interface'" in reason
    assert "not cudnn: 1024 documents in 1048576 tokens" in reason


@pytest.mark.parametrize("dtype,head_dim", [(torch.float32, 128), (torch.float64, 128), (torch.bfloat16, 100)])
def test_what_no_fused_kernel_takes_goes_to_the_reference(gpu, dtype, head_dim):
    assert choose(gpu((9, 0), "fa4", "fa3", "fa2"), dtype, head_dim=head_dim).name == "reference"


def test_a_document_beyond_int32_offsets_is_refused_by_kernels(gpu):
    choice = choose(gpu((9, 0), "fa4"), documents=Documents((0, 2**24)))
    assert choice.name == "reference" and "2^31" in choice.reason
    assert choose(gpu((9, 0), "fa4"), documents=Documents((0, 5 * 2**20))).name == "fa4"


@pytest.mark.parametrize("name", BACKENDS)
def test_a_request_is_kept(gpu, name):
    capability = (9, 0)
    assert choose(gpu(capability, "fa4", "fa3", "fa2"), documents=SHORT, requested=name).name == name


@pytest.mark.parametrize("requested,dtype,message", [
    ("fa4", torch.float32, "--attention-backend fa4 cannot serve .*float32.*; auto or reference can"),
    ("fa3", torch.bfloat16, "No module named 'flash_attn_interface'.*; auto or fa4, cudnn, torch, reference can"),
    ("flash", torch.bfloat16, "--attention-backend flash is unknown; auto, fa4"),
])
def test_refused_requests_say_what_is_accepted(gpu, requested, dtype, message):
    with pytest.raises(ValueError, match=message):
        choose(gpu((9, 0), "fa4"), dtype, requested=requested)


@pytest.mark.parametrize("capability,installed,expected", [
    ((9, 0), ("fa4", "fa3"), "fa4"),
    ((9, 0), ("fa3",), "torch"),  # past FlashAttention-3 and cuDNN
    ((12, 0), ("fa4",), "torch"),
    ((8, 0), (), "torch"),
    ((7, 5), (), "reference"),
])
def test_auto_takes_what_is_deterministic(gpu, capability, installed, expected):
    choice = choose(gpu(capability, *installed), deterministic=True)
    assert choice.name == expected
    if expected != "reference":
        assert ("not cudnn: --deterministic: " in choice.reason) == (expected == "torch")


@pytest.mark.parametrize("requested", ["fa3", "cudnn"])
def test_what_is_not_deterministic_is_refused(gpu, requested):
    device = gpu((9, 0), "fa4", "fa3", "fa2")
    assert choose(device, requested=requested).name == requested
    message = f"{requested} cannot serve .*: --deterministic: .*; auto or fa4, torch, fa2, reference can"
    with pytest.raises(ValueError, match=message):
        choose(device, requested=requested, deterministic=True)


def test_the_cpu_is_deterministic():
    assert choose("cpu", deterministic=True).name == "torch"
    assert choose("cpu", deterministic=True, requested="reference").name == "reference"


@pytest.mark.parametrize("capability,head_dim,expected", [
    ((9, 0), 8, "cudnn"), ((9, 0), 72, "cudnn"), ((9, 0), 80, "cudnn"), ((9, 0), 112, "cudnn"),
    ((9, 0), 64, "fa4"), ((9, 0), 88, "fa4"), ((9, 0), 120, "fa4"), ((9, 0), 192, "fa4"), ((9, 0), 256, "fa4"), ((9, 0), 264, "reference"),
    ((10, 0), 128, "fa4"), ((10, 0), 192, "torch"), ((10, 3), 256, "fa4"), ((12, 0), 64, "fa4"), ((12, 0), 136, "torch"),
    ((13, 0), 64, "cudnn"),
])
def test_head_dims_by_generation(gpu, capability, head_dim, expected):
    choice = choose(gpu(capability, "fa4"), head_dim=head_dim)
    assert choice.name == expected and (expected == "fa4" or "not fa4: " in choice.reason)


def test_old_cudnn_and_impossible_heads(gpu):
    with pytest.raises(ValueError, match="cuDNN is 8907"):
        choose(gpu((9, 0), cudnn_version=8907), requested="cudnn")
    with pytest.raises(ValueError, match="--num-query-groups 3 does not divide --num-attention-heads 8; 1, 2, 4, 8 do"):
        select_backend("auto", "cpu", torch.float32, 64, 8, 3, LONG)


def test_a_package_that_does_not_import_gives_its_reason():
    assert probe.import_error("json") is None
    assert "ModuleNotFoundError" in probe.import_error("no_such_package_anywhere.part")
