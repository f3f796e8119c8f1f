"""Kernels fall into their class by name; each moment is given to one class; traces of GPU and CPU become spans."""

import pytest
import torch

from megacp.benchmark.kernel_classes import ATTENTION, CLASSES, COLLECTIVES, DEVICE_COPIES, ELEMENTWISE, GEMM, HOST_COPIES, IDLE
from megacp.benchmark.kernel_classes import Span, account, kernel_class
from megacp.benchmark.kernel_profile import KernelProfile, spans_of
from megacp.context_parallel import engine
from megacp.kernels.attention import Documents

# As the profiler shows them, shortened.
KERNELS = {
    "nvjet_tst_256x128_64x4_1x2_h_bz_coopA_NTT": GEMM,
    "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas": GEMM,
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_16x16_128x2_tn_align8>(...)": GEMM,
    "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16>(...)": GEMM,
    "ampere_bf16_s16816gemm_bf16_128x128_ldg8_f2f_stages_32x5_tn": GEMM,
    "kernel_cutlass_kernel_flash_attncuteflash_fwd_sm90FlashAttentionForwardSm90_object_at__tensorptrbf16": ATTENTION,
    "kernel_cutlass_kernel_flash_attncuteflash_bwd_postprocessFlashAttentionBackwardPostprocess_object_at_": ATTENTION,
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_3_64x128x128_4x1x1_kernel0_0": ATTENTION,
    "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<pytorch_flash::Flash_bwd_kernel_traits<128>>(...)": ATTENTION,
    "void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90>>>(...)": ATTENTION,
    "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel)": ATTENTION,
    "void at::native::vectorized_elementwise_kernel<8, at::native::CUDAFunctor_add<c10::BFloat16>>(...)": ELEMENTWISE,
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float>>>(...)": ELEMENTWISE,
    "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<direct_copy_kernel_cuda>>(...)": ELEMENTWISE,
    "kernel_cutlass_kernel_quackrmsnormRMSNorm_object_at__tensorptrbf16gmem": ELEMENTWISE,
    "_rms_norm_backward_kernel": ELEMENTWISE,
    "_swiglu_kernel": ELEMENTWISE,
    "Memset (Device)": ELEMENTWISE,
    "Memcpy DtoD (Device -> Device)": DEVICE_COPIES,
    "Memcpy PtoP (Device -> Device)": DEVICE_COPIES,
    "Memcpy HtoD (Pinned -> Device)": HOST_COPIES,
    "Memcpy DtoH (Device -> Pinned)": HOST_COPIES,
    "ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)": COLLECTIVES,
}
OPERATORS = {
    "aten::mm": GEMM, "aten::addmm_": GEMM, "aten::bmm": GEMM, "aten::linear": GEMM, "aten::copy_": DEVICE_COPIES,
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": ATTENTION, "aten::mul": ELEMENTWISE, "aten::mean": ELEMENTWISE,
    "aten::addcmul": ELEMENTWISE, "aten::fill_": ELEMENTWISE,
}  # fmt: skip


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernels_class(name):
    assert kernel_class(name) == KERNELS[name]


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operators_class(name):
    assert kernel_class(name, on_cpu=True) == OPERATORS[name]


def test_each_moment_goes_to_the_first_class_that_runs():
    flash, gemm, norm, copy = "flash_fwd", "nvjet", "rms_norm", "Memcpy DtoH (Device -> Pinned)"
    spans = [
        Span(copy, 0.0, 10.0, bytes_=1000), Span(flash, 1.0, 3.0), Span(gemm, 2.0, 5.0), Span(gemm, 4.5, 6.0),
        Span(norm, 12.0, 13.0),
    ]  # fmt: skip
    accounts = account(spans, wall_s=15.0)
    assert {name: a.exposed_s for name, a in accounts.items() if a.exposed_s} == pytest.approx(
        {ATTENTION: 2.0, GEMM: 3.0, ELEMENTWISE: 1.0, HOST_COPIES: 1 + 4, IDLE: 15 - 11}
    )
    assert accounts[GEMM].busy_s == pytest.approx(4.5) and accounts[GEMM].count == 2
    assert accounts[HOST_COPIES].busy_s == 10.0 and accounts[HOST_COPIES].bytes_ == 1000
    assert list(accounts) == list(CLASSES)
    assert sum(a.exposed_s for a in accounts.values()) == pytest.approx(15.0)


def test_exposed_times_against_a_walk_in_small_steps():
    generator = torch.Generator().manual_seed(3)
    names = list(KERNELS)
    spans = []
    for _ in range(200):
        start, length, name = (int(torch.randint(limit, (), generator=generator)) for limit in (900, 40, len(names)))
        spans.append(Span(names[name], float(start), float(start + length + 1)))
    walked = dict.fromkeys(CLASSES, 0)
    for moment in range(1000):
        running = {KERNELS[span.name] for span in spans if span.start_s <= moment < span.stop_s}
        walked[next((class_ for class_ in CLASSES if class_ in running), IDLE)] += 1
    assert {name: a.exposed_s for name, a in account(spans, 1000.0).items()} == pytest.approx(walked)


def test_a_gpus_trace_counts_kernels_and_copies_only():
    events = [
        {"ph": "X", "cat": "kernel", "name": "nvjet", "ts": 2e6, "dur": 1e6, "args": {"stream": 7}},
        {"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy DtoD (Device -> Device)", "ts": 3e6, "dur": 5e5, "args": {"bytes": 4096}},
        {"ph": "X", "cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 1e6, "dur": 10, "pid": 1, "tid": 1},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 1e6, "dur": 20, "pid": 1, "tid": 1},
        {"ph": "M", "name": "process_name"},
    ]
    kernel, copy = spans_of(events)
    assert (kernel.name, kernel.start_s, kernel.stop_s, kernel.on_cpu) == ("nvjet", pytest.approx(2.0), pytest.approx(3.0), False)
    assert copy.bytes_ == 4096


def test_operators_within_operators_count_once():
    def op(name, start, stop):
        return {"ph": "X", "cat": "cpu_op", "name": name, "ts": start, "dur": stop - start, "pid": 1, "tid": 1}

    events = [
        op("Backward", 0, 100), op("aten::linear", 10, 40), op("aten::mm", 12, 38), op("aten::softmax", 50, 80),
        op("aten::_softmax", 55, 75), op("aten::clone", 85, 95), op("aten::copy_", 87, 94),
    ]  # fmt: skip
    assert [span.name for span in spans_of(events)] == ["aten::linear", "aten::_softmax", "aten::copy_"]


def test_a_profile_on_the_cpu_finds_products_and_waiting():
    device, a = torch.device("cpu"), torch.randn(256, 256)
    profile = KernelProfile(device)
    with profile("products"):
        for _ in range(3):
            a @ a
    phase = profile.phases["products"]
    accounts = account(phase.spans, phase.wall_s)
    assert accounts[GEMM].count == 3 and 0 < accounts[GEMM].exposed_s < phase.wall_s
    assert sum(a.exposed_s for a in accounts.values()) == pytest.approx(phase.wall_s)


@pytest.mark.parametrize("queries", [64, 128])  # a query chunk, and all
def test_attention_on_the_cpu_is_attention_whatever_operators_it_is_made_of(queries):
    q, do = torch.randn(2, queries, 4, 16)
    k, v = torch.randn(2, 128, 2, 16)
    documents, profile = Documents((0, 128)), KernelProfile(torch.device("cpu"))
    with profile("forward"):
        o, lse = engine.attention_forward(q, k, v, documents, 0.25, "torch")
        torch.randn(8, 8) @ torch.randn(8, 8)
    with profile("backward"):
        engine.attention_backward(do, q, k, v, o, lse, documents, 0.25, "torch")
    for name, products in ("forward", 1), ("backward", 0):
        accounts = account(profile.phases[name].spans, profile.phases[name].wall_s)
        assert (accounts[ATTENTION].count, accounts[GEMM].count) == (1, products)
        assert 0 < accounts[ATTENTION].exposed_s <= profile.phases[name].wall_s
