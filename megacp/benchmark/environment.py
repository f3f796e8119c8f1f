"""Where figures come from: hardware, commit, versions, the command.

    describe(torch.device("cuda"), commit=None)["device"]        # "NVIDIA H200"
"""

import datetime
import importlib.metadata
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "triton", "flash-attn-4", "flash-attn", "nvidia-cudnn-cu13", "nvidia-cutlass-dsl", "quack-kernels")


def describe(device: torch.device, commit: str | None) -> dict:
    """`commit` where the folder is no git checkout; else git is asked."""
    cuda = device.type == "cuda"
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(device) if cuda else f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "commit": commit or git_commit(),
        "python": platform.python_version(),
        "cuda": torch.version.cuda,
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "command": shlex.join(["python", *sys.argv]),
    }


def git_commit() -> str:
    """Short hash of the checkout, `-dirty` with changes that are not committed; "unknown" without git."""
    try:
        command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
