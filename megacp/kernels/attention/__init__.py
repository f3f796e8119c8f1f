"""Attention over a packed stream of documents: forward and backward, over interchangeable backends (see dispatch)."""

from megacp.kernels.attention.dispatch import BackendChoice, attention_backward, attention_forward, select_backend
from megacp.kernels.attention.documents import Documents

__all__ = ["BackendChoice", "Documents", "attention_backward", "attention_forward", "select_backend"]
