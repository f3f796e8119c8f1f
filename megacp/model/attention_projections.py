"""Between a rank's hidden states and the all-to-all send layout: normalise, project, turn by RoPE, pack; and the way back.

Everything runs in tiles of `t` tokens. Nothing as wide as all heads is ever built: a stage's heads of one tile are projected and
written straight to their place in the send buffer.

    h_Td ── RMSNorm ── W[stage rows]ᵀ ── (q/k norm) ── RoPE ──▶ q_CTnD[:, tile]        forward, and again in backward
    g_Td ── Wo[stage columns] ──▶ do_CTnD[:, tile]                                    backward
    dxn_Td, weight gradients ◀── W ── (q/k norm)' ── RoPEᵀ ◀── dq_CTnD[:, tile]        backward

Worked example, Llama3-8B on 8 ranks, U = 8, tiles of 8,192: the query weight `[4096, 4096]` is viewed `[8, 4, 128, 4096]`; stage 1
takes `[:, 1:2]`, so a tile makes `[8192, 8, 128]`, one head for each of the 8 ranks, and writes it to `[8, 131072, 1, 128]`.

Letters: C ranks of the Ulysses group, G = min(C, K) groups of KV heads, T tokens of the rank, c of a query chunk, t of a tile, n query heads and m KV
heads of a stage for one rank, D head dim, d hidden size.
"""

from collections.abc import Iterator

from torch import Tensor

from megacp.context_parallel.head_schedule import Stage
from megacp.kernels.precision import compute_dtype
from megacp.kernels.rms_norm import rms_norm, rms_norm_backward
from megacp.kernels.rotary import apply_rotary, rotary_cos_sin
from megacp.kernels.weight_gradient import accumulate_weight_gradient
from megacp.memory.shelves import RowShelf, read_ahead
from megacp.model.layer_context import LayerContext, LayerWeights


class AttentionProjections:
    """The pack and unpack functions of one layer for the engine, bound to its input and weights.

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

    def pack_q(self, stage: Stage, first: int, last: int) -> Tensor:
        """Send buffer q_CcnD of the stage's query heads for the chunk of tokens `[first, last)`; block `r` is for rank `r`."""
        w_od = self._query_rows(self.weights.q_proj, stage).flatten(0, 2)
        q_CcnD = self._new_send_buffer(last - first, stage.num_queries)
        for start, stop, xn_td in self._normed_tiles(first, last):
            q_thD = self._project(xn_td, w_od, self.weights.q_norm, self._cos_sin(start, stop))
            tile_CtnD = q_CcnD[:, start - first : stop - first]
            self._write_heads(tile_CtnD.unflatten(0, (self.schedule.ulysses_degree, 1)), q_thD)
        return q_CcnD

    def pack_kv(self, stage: Stage) -> tuple[Tensor, Tensor]:
        """Send buffers k_CTmD and v_CTmD of the stage's new KV heads. With `K < C` several blocks hold the same head."""
        wk_od, wv_od = (self._kv_rows(w, stage).flatten(0, 2) for w in (self.weights.k_proj, self.weights.v_proj))
        tokens = self.context.tokens
        k_CTmD, v_CTmD = (self._new_send_buffer(tokens, stage.num_new_kv) for _ in range(2))
        groups = (self.schedule.kv_groups, self.schedule.kv_copies)
        for start, stop, xn_td in self._normed_tiles(0, tokens):
            k_thD = self._project(xn_td, wk_od, self.weights.k_norm, self._cos_sin(start, stop))
            self._write_heads(k_CTmD[:, start:stop].unflatten(0, groups), k_thD)
            self._write_heads(v_CTmD[:, start:stop].unflatten(0, groups), self._heads(xn_td @ wv_od.t()))
        return k_CTmD, v_CTmD

    def pack_do(self, stage: Stage, first: int, last: int) -> Tensor:
        """Send buffer do_CcnD: the gradient of the stage's attention output, `g · Wo` of its heads; block `r` is for rank `r`.

        Made anew from the residual gradient for each stage: dO of all heads, another [T, H·D], never exists.
        """
        w_do = self._output_columns(self.weights.o_proj, stage).flatten(1)
        do_CcnD = self._new_send_buffer(last - first, stage.num_queries)
        for (start, stop), (g_td,) in read_ahead(self.context.tiles(first, last), lambda tile: [self.residual.fetch(*tile)]):
            tile_CtnD = do_CcnD[:, start - first : stop - first]
            self._write_heads(tile_CtnD.unflatten(0, (self.schedule.ulysses_degree, 1)), self._heads(g_td @ w_do))
        self.residual.rest()
        return do_CcnD

    def unpack_dq(self, stage: Stage, first: int, last: int, dq_CcnD: Tensor) -> None:
        """Adds the share of the stage's chunk `[first, last)` to `dxn_Td` and to the gradients of `q_proj` (and `q_norm`)."""
        w_od = self._query_rows(self.weights.q_proj, stage).flatten(0, 2)
        dw_CnDd = self._query_rows(self.grads.q_proj, stage)
        norm = self.weights.q_norm, self.grads.q_norm
        for start, stop, xn_td in self._normed_tiles(first, last):
            dq_thD = dq_CcnD[:, start - first : stop - first].transpose(0, 1).flatten(1, 2)
            dq_to = self._project_backward(dq_thD, xn_td, w_od, *norm, self._cos_sin(start, stop))
            self._add(start, stop, dq_to, xn_td, w_od, dw_CnDd)

    def unpack_dkv(self, stage: Stage, dk_CTmD: Tensor, dv_CTmD: Tensor) -> None:
        """Adds the share of the KV heads that `stage` brought; sums the copies of a head first."""
        wk_od, wv_od = (self._kv_rows(w, stage).flatten(0, 2) for w in (self.weights.k_proj, self.weights.v_proj))
        dwk_GmDd, dwv_GmDd = (self._kv_rows(dw, stage) for dw in (self.grads.k_proj, self.grads.v_proj))
        norm = self.weights.k_norm, self.grads.k_norm
        for start, stop, xn_td in self._normed_tiles(0, self.context.tokens):
            dk_thD = self._sum_copies(dk_CTmD[:, start:stop])
            dk_to = self._project_backward(dk_thD, xn_td, wk_od, *norm, self._cos_sin(start, stop))
            self._add(start, stop, dk_to, xn_td, wk_od, dwk_GmDd)
            self._add(start, stop, self._sum_copies(dv_CTmD[:, start:stop]).flatten(1), xn_td, wv_od, dwv_GmDd)

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

    def _cos_sin(self, start: int, stop: int) -> tuple[Tensor, Tensor]:
        c = self.context
        dtype = compute_dtype(self.weights.q_proj.dtype)
        return rotary_cos_sin(c.position_ids_T[start:stop], c.inv_freq_D2, c.rotary_factor, dtype)

    def _heads(self, y_to: Tensor) -> Tensor:
        return y_to.unflatten(1, (-1, self.head_dim))

    def _project(self, xn_td: Tensor, w_od: Tensor, norm_D: Tensor | None, cos_sin: tuple[Tensor, Tensor]) -> Tensor:
        """Heads of a tile, q or k, ready for attention: `[t, o/D, D]`."""
        y_thD = self._heads(xn_td @ w_od.t())
        if norm_D is not None:
            y_thD = rms_norm(y_thD, norm_D, self.eps)
        return apply_rotary(y_thD, *cos_sin, out=y_thD)

    def _project_backward(self, dy_thD, xn_td, w_od, norm_D, dnorm_D, cos_sin) -> Tensor:
        """Gradient dy_to of what the GEMM of `_project` made; with a q/k norm the heads are projected again for its backward."""
        dy_thD = apply_rotary(dy_thD, *cos_sin, inverse=True)
        if norm_D is not None:
            dy_thD, dnorm_tile_D = rms_norm_backward(dy_thD, self._heads(xn_td @ w_od.t()), norm_D, self.eps)
            dnorm_D += dnorm_tile_D
        return dy_thD.flatten(1)

    def _add(self, start: int, stop: int, dy_to: Tensor, xn_td: Tensor, w_od: Tensor, dw: Tensor) -> None:
        """Backward of the GEMM of one tile: into `dxn_Td` and into the weight-gradient total `dw`."""
        self.dxn_Td[start:stop].addmm_(dy_to, w_od)
        accumulate_weight_gradient(dw, dy_to, xn_td)

    def _write_heads(self, tile_GctmD: Tensor, y_thD: Tensor) -> None:
        """Writes the `G·m` heads of a tile to their blocks, `c` equal blocks a group."""
        groups, _, tokens, heads, _ = tile_GctmD.shape
        tile_GctmD.copy_(y_thD.view(tokens, groups, heads, self.head_dim).transpose(0, 1).unsqueeze(1))

    def _sum_copies(self, dy_CtmD: Tensor) -> Tensor:
        """`[C, t, m, D]` → `[t, G·m, D]`, contiguous; the copies of a head summed in the precision of statistics."""
        dy_GctmD = dy_CtmD.unflatten(0, (self.schedule.kv_groups, self.schedule.kv_copies))
        if self.schedule.kv_copies == 1:
            dy_GtmD = dy_GctmD.squeeze(1)
        else:
            dy_GtmD = dy_GctmD.sum(1, dtype=compute_dtype(dy_CtmD.dtype)).to(dy_CtmD.dtype)
        return dy_GtmD.transpose(0, 1).flatten(1, 2)
