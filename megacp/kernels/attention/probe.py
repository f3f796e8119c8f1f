"""What the device and the installed packages can do: every question that backend selection asks, in one place.

    import_error("flash_attn.cute.interface")            None when it imports, else "ModuleNotFoundError: No module named ..."
    cuda_refusal(device, torch.float32, 128, (8, 0), 256)  "float32 inputs: it takes bfloat16 and float16"
"""

import functools
import importlib

import torch


@functools.cache
def import_error(module: str) -> str | None:
    """Why an optional package cannot be used; None when it imports. Asked once per process, for imports take seconds."""
    try:
        importlib.import_module(module)
    except Exception as error:  # a broken binary package raises anything; the reason is shown with the choice of backend
        return f"{type(error).__name__}: {error}"
    return None


def compute_capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def device_name(device: torch.device) -> str:
    """Such as "NVIDIA H200" or "CPU"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper()


def cudnn_version() -> int:
    """Such as 91900 for 9.19; 0 without cuDNN."""
    return torch.backends.cudnn.version() or 0


def cuda_refusal(device: torch.device, dtype: torch.dtype, head_dim: int, minimum_capability: tuple[int, int],
                 maximum_head_dim: int) -> str | None:
    """The limits that all fused GPU kernels share: a device new enough, 16-bit inputs, a head dim in multiples of 8."""
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if compute_capability(device) < minimum_capability:
        return f"the GPU is {_sm(compute_capability(device))}, {_sm(minimum_capability)} or newer is needed"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"{str(dtype).removeprefix('torch.')} inputs: it takes bfloat16 and float16"
    if head_dim % 8 or not 8 <= head_dim <= maximum_head_dim:
        return f"head dim {head_dim}: it takes multiples of 8 up to {maximum_head_dim}"
    return None


def _sm(capability: tuple[int, int]) -> str:
    return f"sm{capability[0]}{capability[1]}"
