"""Triton kernels are compiled where there is a GPU and interpreted elsewhere, so `tests/kernels/test_*_triton.py` run anywhere.

Triton reads the variable when it is imported, and other libraries import it: so it is set here, before any test module is read.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
