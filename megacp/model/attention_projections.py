"""Between a rank's hidden states and the all-to-all send layout: normalise, project, turn by RoPE, pack; and the way back.

Everything runs in tiles of `t` tokens. Nothing as wide as all heads is ever built: a stage's heads of one tile are projected and
written straight to their place in the send buffer.

    h_Td ── RMSNorm ── W[stage rows]ᵀ ── (q/k norm) ── RoPE ──▶ q_CTnD[:, tile]        forward, and again in backward
    g_Td ── Wo[stage columns] ──▶ do_CTnD[:, tile]                                    backward
    dxn_Td, weight gradients ◀── W ── (q/k norm)' ── RoPEᵀ ◀── dq_CTnD[:, tile]        backward

The gradients of one stage and the projections of the next need the same normalised tiles, and take them in one pass over `h`.

Worked example, Llama3-8B on 8 ranks, U = 8, tiles of 8,192: the query weight `[4096, 4096]` is viewed `[8, 4, 128, 4096]`; stage 1
takes `[:, 1:2]`, so a tile makes `[8192, 8, 128]`, one head for each of the 8 ranks, and writes it to `[8, 131072, 1, 128]`.

Letters: C ranks of the Ulysses group, G = min(C, K) groups of KV heads, T tokens of the rank, c of a query chunk, t of a tile,
n query heads and m KV heads of a stage for one rank, D head dim, d hidden size.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import NamedTuple

from torch import Tensor

from megacp.context_parallel.engine import Gradient, QueryChunk, QueryGradient
from megacp.context_parallel.head_schedule import Stage
from megacp.kernels.head_layout import CosSin, pack_heads, unpack_heads
from megacp.kernels.precision import compute_dtype
from megacp.kernels.rms_norm import rms_norm, rms_norm_backward
from megacp.kernels.rotary import rotary_cos_sin
from megacp.kernels.weight_gradient import accumulate_weight_gradient, matrix_total
from megacp.memory.shelves import RowShelf, read_ahead
from megacp.model.layer_context import LayerContext, LayerWeights


class AttentionProjections:
    """What the engine calls in one layer, bound to its input and weights.

    `h` is the shelf of the input `h_Td`, wherever it lives. `grads` (weight-gradient totals), `dxn_Td` (gradient of the normalised
    input, added to) and `residual` (the shelf of the gradient behind the attention) are for the backward only.
    """

    def __init__(
        self,
        context: LayerContext,
        h: RowShelf,
        weights: LayerWeights,
        norm_epsilon: float,
        head_dim: int,
        grads: LayerWeights | None = None,
        dxn_Td: Tensor | None = None,
        residual: RowShelf | None = None,
    ):
        self.context, self.schedule = context, context.attention.schedule
        self.h, self.weights, self.eps, self.head_dim = h, weights, norm_epsilon, head_dim
        self.grads, self.dxn_Td, self.residual = grads, dxn_Td, residual

    def turn(self, gradients: list[Gradient], chunk: QueryChunk | None = None) -> list[Tensor]:
        """Takes gradients that came back, then fills the send buffers of `chunk`; see `stages_forward` and `stages_backward`.

        One pass over `h` for all that spans the same tokens.
        """
        sends: list[Tensor] = []
        with ExitStack() as totals:
            self._run([self._taking(gradient, totals) for gradient in gradients] + self._packing(chunk, sends))
        return sends

    def close(self, gradients: list[Gradient], out_Td: Tensor) -> None:
        """The last gradients; then `out_Td` becomes the gradient of `h`. It may be the memory of `dxn_Td` or of the residual."""
        whole = 0, self.context.tokens
        with ExitStack() as totals:
            steps = [self._taking(gradient, totals) for gradient in gradients]
            self._run([step for step in steps if step.span != whole])
            steps = [step for step in steps if step.span == whole]
            tiles = read_ahead(self.context.tiles(), lambda tile: [self.h.fetch(*tile), self.residual.fetch(*tile)])
            for (start, stop), (h_td, g_td) in tiles:
                xn_td, cos_sin = rms_norm(h_td, self.weights.input_layernorm, self.eps), self._cos_sin(start, stop)
                for step in steps:
                    step.take_tile(start, stop, xn_td, cos_sin)
                _, dnorm_d = rms_norm_backward(
                    self.dxn_Td[start:stop], h_td, self.weights.input_layernorm, self.eps, residual=g_td, out=out_Td[start:stop]
                )
                self.grads.input_layernorm.add_(dnorm_d)

    def pack_do(self, stage: Stage, first: int, last: int) -> Tensor:
        """Send buffer do_CcnD: the gradient of the stage's attention output, `g · Wo` of its heads; block `r` is for rank `r`.

        Made anew from the residual gradient for each stage: dO of all heads, another [T, H·D], never exists.
        """
        w_do = self._output_columns(self.weights.o_proj, stage).flatten(1)
        do_CcnD = self._new_send_buffer(last - first, stage.num_queries)
        for (start, stop), (g_td,) in read_ahead(self.context.tiles(first, last), lambda tile: [self.residual.fetch(*tile)]):
            pack_heads(g_td @ w_do, do_CcnD[:, start - first : stop - first], 1)
        self.residual.rest()
        return do_CcnD

    def _packing(self, chunk: QueryChunk | None, sends: list[Tensor]) -> list["_Step"]:
        """Adds to `sends` the chunk's buffers, to be filled: q_CcnD, and k_CTmD and v_CTmD of the stage's new KV heads.

        Block `r` is for rank `r`; with `K < C` several blocks of k and v hold the same head.
        """
        if chunk is None:
            return []
        stage, tokens = chunk.stage, self.context.tokens
        wq_od = self._query_rows(self.weights.q_proj, stage).flatten(0, 2)
        q_CcnD = self._new_send_buffer(chunk.stop - chunk.start, stage.num_queries)
        sends.append(q_CcnD)
        steps = [_Step((chunk.start, chunk.stop), partial(self.pack_q, stage, wq_od, q_CcnD, chunk.start))]
        if chunk.brings_kv:
            wk_od, wv_od = (self._kv_rows(w, stage).flatten(0, 2) for w in (self.weights.k_proj, self.weights.v_proj))
            k_CTmD, v_CTmD = (self._new_send_buffer(tokens, stage.num_new_kv) for _ in range(2))
            sends += k_CTmD, v_CTmD
            steps.append(_Step((0, tokens), partial(self.pack_kv, stage, wk_od, wv_od, k_CTmD, v_CTmD)))
        return steps

    def pack_q(
        self, stage: Stage, w_od: Tensor, q_CcnD: Tensor, first: int, start: int, stop: int, xn_td: Tensor, cos_sin: CosSin
    ) -> None:
        """The queries of a tile, into the buffer of the tokens from `first` on."""
        tile_CtnD = q_CcnD[:, start - first : stop - first]
        pack_heads(xn_td @ w_od.t(), tile_CtnD, 1, cos_sin, self.weights.q_norm, self.eps)

    def pack_kv(
        self, stage: Stage, wk_od: Tensor, wv_od: Tensor, k_CTmD: Tensor, v_CTmD: Tensor,
        start: int, stop: int, xn_td: Tensor, cos_sin: CosSin,
    ) -> None:  # fmt: skip
        """Keys and values of a tile."""
        copies = self.schedule.kv_copies
        pack_heads(xn_td @ wk_od.t(), k_CTmD[:, start:stop], copies, cos_sin, self.weights.k_norm, self.eps)
        pack_heads(xn_td @ wv_od.t(), v_CTmD[:, start:stop], copies)

    def _taking(self, gradient: Gradient, totals: ExitStack) -> "_Step":
        """Adds the gradient's share to `dxn_Td` and to the gradients of the weights, whose sums are theirs when `totals` closes."""
        span, w, dw = _span(gradient, (0, self.context.tokens)), self.weights, self.grads
        if isinstance(gradient, QueryGradient):
            stage = gradient.chunk.stage
            w_od = self._query_rows(w.q_proj, stage).flatten(0, 2)
            dw_od = totals.enter_context(matrix_total(self._query_rows(dw.q_proj, stage)))
            return _Step(span, partial(self.take_dq, stage, w_od, dw_od, gradient.dq_CtnD, span[0]))
        stage = gradient.stage
        wk_od, wv_od = (self._kv_rows(x, stage).flatten(0, 2) for x in (w.k_proj, w.v_proj))
        dwk_od, dwv_od = (totals.enter_context(matrix_total(self._kv_rows(x, stage))) for x in (dw.k_proj, dw.v_proj))
        return _Step(span, partial(self.take_dkv, stage, wk_od, wv_od, dwk_od, dwv_od, gradient.dk_CTmD, gradient.dv_CTmD))

    def take_dq(
        self, stage: Stage, w_od: Tensor, dw_od: Tensor, dq_CcnD: Tensor, first: int,
        start: int, stop: int, xn_td: Tensor, cos_sin: CosSin,
    ) -> None:  # fmt: skip
        """A tile of a query gradient, which begins with token `first`."""
        norm = self.weights.q_norm, self.grads.q_norm
        dq_to = self._unpack(dq_CcnD[:, start - first : stop - first], 1, cos_sin, xn_td, w_od, *norm)
        self._add(start, stop, dq_to, xn_td, w_od, dw_od)

    def take_dkv(
        self, stage: Stage, wk_od: Tensor, wv_od: Tensor, dwk_od: Tensor, dwv_od: Tensor, dk_CTmD: Tensor, dv_CTmD: Tensor,
        start: int, stop: int, xn_td: Tensor, cos_sin: CosSin,
    ) -> None:  # fmt: skip
        """A tile of the gradients of keys and values; sums the copies of a head first."""
        norm, copies = (self.weights.k_norm, self.grads.k_norm), self.schedule.kv_copies
        dk_to = self._unpack(dk_CTmD[:, start:stop], copies, cos_sin, xn_td, wk_od, *norm)
        self._add(start, stop, dk_to, xn_td, wk_od, dwk_od)
        dv_to, _ = unpack_heads(dv_CTmD[:, start:stop], copies)
        self._add(start, stop, dv_to, xn_td, wv_od, dwv_od)

    def _run(self, steps: list["_Step"]) -> None:
        for span in dict.fromkeys(step.span for step in steps):
            for start, stop, xn_td in self._normed_tiles(*span):
                cos_sin = self._cos_sin(start, stop)
                for step in steps:
                    if step.span == span:
                        step.take_tile(start, stop, xn_td, cos_sin)

    def _normed_tiles(self, first: int, last: int) -> Iterator[tuple[int, int, Tensor]]:
        """`(start, stop, xn_td)` of each tile of the tokens `[first, last)`: the normalised input."""
        for (start, stop), (h_td,) in read_ahead(self.context.tiles(first, last), lambda tile: [self.h.fetch(*tile)]):
            yield start, stop, rms_norm(h_td, self.weights.input_layernorm, self.eps)
        self.h.rest()  # its staging would stay through the attention

    def _new_send_buffer(self, tokens: int, heads: int) -> Tensor:
        return self.weights.q_proj.new_empty(self.schedule.ulysses_degree, tokens, heads, self.head_dim)

    def _query_rows(self, w: Tensor, stage: Stage) -> Tensor:
        """`[H·D, d]` → the stage's rows `[C, n, D, d]`, a view."""
        shape = (self.schedule.ulysses_degree, self.schedule.heads_per_rank, self.head_dim)
        return w.unflatten(0, shape)[:, stage.q_start : stage.q_stop]

    def _output_columns(self, w: Tensor, stage: Stage) -> Tensor:
        """`[d, H·D]` → the stage's columns `[d, C, n, D]`, a view."""
        shape = (self.schedule.ulysses_degree, self.schedule.heads_per_rank, self.head_dim)
        return w.unflatten(1, shape)[:, :, stage.q_start : stage.q_stop]

    def _kv_rows(self, w: Tensor, stage: Stage) -> Tensor:
        """`[K·D, d]` → the stage's rows `[G, m, D, d]`, a view."""
        shape = (self.schedule.kv_groups, self.schedule.kv_heads_per_rank, self.head_dim)
        return w.unflatten(0, shape)[:, stage.kv_start : stage.kv_stop]

    def _cos_sin(self, start: int, stop: int) -> CosSin:
        c = self.context
        dtype = compute_dtype(self.weights.q_proj.dtype)
        return rotary_cos_sin(c.position_ids_T[start:stop], c.inv_freq_D2, c.rotary_factor, dtype)

    def _unpack(self, dy_CtnD, copies, cos_sin, xn_td, w_od, norm_D: Tensor | None, dnorm_D: Tensor | None) -> Tensor:
        """Gradient dy_to of what the GEMM of q or k made; with a q/k norm that GEMM is run again for the norm's backward."""
        y_to = None if norm_D is None else xn_td @ w_od.t()
        dy_to, dnorm_tile_D = unpack_heads(dy_CtnD, copies, cos_sin, y_to, norm_D, self.eps)
        if norm_D is not None:
            dnorm_D += dnorm_tile_D
        return dy_to

    def _add(self, start: int, stop: int, dy_to: Tensor, xn_td: Tensor, w_od: Tensor, dw_od: Tensor) -> None:
        """Backward of the GEMM of one tile: into `dxn_Td` and into the weight-gradient total of the stage."""
        self.dxn_Td[start:stop].addmm_(dy_to, w_od)
        accumulate_weight_gradient(dw_od, dy_to, xn_td)


class _Step(NamedTuple):
    """`take_tile(start, stop, xn_td, cos_sin)` is to be called for each tile of the tokens `span`."""

    span: tuple[int, int]
    take_tile: Callable[[int, int, Tensor, CosSin], None]


def _span(gradient: Gradient, whole: tuple[int, int]) -> tuple[int, int]:
    """The tokens of a gradient."""
    return (gradient.chunk.start, gradient.chunk.stop) if isinstance(gradient, QueryGradient) else whole
