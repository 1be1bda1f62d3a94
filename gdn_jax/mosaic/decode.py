"""The layer on one token a sequence, or on a verify step, in one launch: conv update, gating, rule, gated norm.

    y <- act(bias + sum of w_i window_i);   g = -exp(A_log) softplus(a + dt_bias);   beta = sigmoid(b)
    M <- e^g M;   u = beta (v - M^T k');   M <- M + k' u^T;   o = M^T q';   o <- norm(o) w silu(z)

Beside the states, whose bytes count, a sequence moves its conv rows, 2 D (W - 1 + S) elements, about 5 % of them in bfloat16.
A CTA takes one value head: the conv of its channels of q, k and v, whose outputs go through shared memory, then tiles of 64
columns of the state by the code of the rule kernels, then the norm. The conv rows of a key head are read by all its value heads
and shifted in place: these CTAs form a cluster, each arrives at a barrier when it has used the rows, and the first writes them
when all have.

| CTA | when | why |
|---|---|---|
| 2 warpgroups, states straight from global memory | N HV <= 132 | a CTA an SM at most: the shortest way |
| 1 warpgroup, all its tiles by TMA at once, then one after the other | else | registers of one tile (3 CTAs on an SM) |
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import Array, lax

from gdn_jax.mosaic.common import (
    channels_layout,
    decay_of,
    direct_layout,
    f32,
    i32,
    keep,
    launch,
    load,
    row_layout,
    rule_step,
    sigmoid,
    swizzled,
    swizzled_layout,
)
from gdn_jax.types import GDNConfig, GDNWeights
from gdn_jax.varlen import inside

COLUMNS = 64  # of a tile
FEW = 132  # value heads of a batch: as many as SMs


def decode(
    mixed: Array,
    weights: GDNWeights,
    norm_weight: Array | None,
    norm_eps: Array,
    conv: Array,
    ssm: Array,
    slots: Array,
    has_initial_state: Array | None,
    num_accepted_tokens: Array | None,
    query_start_loc: Array | None,
    layer: Array,
    *,
    config: GDNConfig,
) -> tuple[Array, Array, Array]:
    """`mixed` `[T, qkvz_dim + ba_dim]`, `conv` `[L, num_slots, D, W - 1 + S]`, `ssm` `[L, num_slots (S + 1), HV, K, V]`, `slots`
    `[N]`, `layer` int32 of any value. With `query_start_loc` `[N + 1]` and `num_accepted_tokens` `[N]` a verify step, else T = N
    tokens of one sequence each, with `has_initial_state` bool `[N]`. T, N, L and num_slots are at least 1.

    Returns `o` `[T, HV, V]` in `mixed.dtype` and the updated pools.
    """
    num_tokens, n, dtype = mixed.shape[0], slots.shape[0], mixed.dtype
    num_layers, num_slots, _, columns = conv.shape
    h_count, hv_count, k_dim, v_dim = config.tp_num_k_heads, config.tp_num_v_heads, config.head_k_dim, config.head_v_dim
    width, longest, per_k_head = config.conv_kernel_dim, config.mtp_step + 1, hv_count // h_count
    few, verify = n * hv_count <= FEW, query_start_loc is not None
    warpgroups = min(2, v_dim // COLUMNS) if few else 1
    own = v_dim // warpgroups  # columns of a warpgroup
    tiles = own // COLUMNS
    staged = longest > 1 or not few
    layout = (swizzled_layout if staged else direct_layout)(COLUMNS, ssm.dtype)
    of_k, of_v, of_row = layout.reduce(1), layout.reduce(0), row_layout()
    buffers = tiles + (longest > 1)  # the states to start from, and a spare one to store from in turn

    inputs = dict(
        x=mixed, weight=weights.conv_weight, bias=weights.conv_bias, A_log=weights.A_log, dt_bias=weights.dt_bias,
        norm_weight=norm_weight, norm_eps=norm_eps[None], slots=slots, layer=layer[None], accepted=num_accepted_tokens,
        loc=query_start_loc, has=None if has_initial_state is None else has_initial_state.astype(i32),
    )  # fmt: skip
    given = {name: x for name, x in inputs.items() if x is not None}

    def body(*refs: Any) -> None:
        ref = dict(zip(given, refs))
        conv_ref, ssm_ref, o_ref, tiles_sm, qk_sm, v_sm, o_sm, rows_sm, *barriers = refs[len(given) :]
        arrived, convolved, out_ready, *rows_used = barriers
        i, h, member, wg = (lax.axis_index(name) for name in ("n", "h", "member", "wg"))
        hv = h * per_k_head + member
        slot, at = ref["slots"][i], ref["layer"][0]
        start, end, offset = i, i + 1, 0
        valid = inside(slot, num_slots) & inside(at, num_layers)
        if verify:
            start = jnp.clip(ref["loc"][i], 0, num_tokens)
            end = jnp.clip(ref["loc"][i + 1], start, num_tokens)
            offset = ref["accepted"][i] - 1
            valid &= inside(offset, longest) & (end - start <= longest)
        length, row = end - start, at * num_slots + slot

        def columns_of(tile: int) -> Any:
            return pl.ds(wg * own + tile * COLUMNS, COLUMNS)

        def state_at(token: Any, tile: int) -> Any:
            return ssm_ref.at[row * longest + token, hv, :, columns_of(tile)]

        @pl.when(valid & (length > 0))
        def _() -> None:
            if staged:
                for tile in range(tiles):
                    plgpu.copy_gmem_to_smem(state_at(offset, tile), tiles_sm.at[wg, tile], arrived.at[wg, tile])
            m: Any = None if staged else load(state_at(offset, 0), layout)
            tokens = [jnp.minimum(start + t, num_tokens - 1) for t in range(longest)]
            has = ref["has"][i] != 0 if "has" in ref else None

            # Everything is loaded before anything is stored: no load passes a store.
            def channels(first: Any, size: int) -> tuple[Any, ...]:
                """`(first, size, bias, taps, window)` of some channels; the window is the history, then the new inputs."""
                lanes, here = channels_layout(size), pl.ds(first, size)
                bias = load(ref["bias"].at[here], lanes) if "bias" in ref else None
                taps = [load(ref["weight"].at[here, j], lanes) for j in range(width)]
                history = [load(conv_ref.at[row, here, offset + j], lanes) for j in range(width - 1)]
                history = [x if has is None else keep(has, x, lanes) for x in history]
                return first, size, bias, taps, history + [load(ref["x"].at[token, here], lanes) for token in tokens]

            size = min(k_dim, 2 * k_dim // warpgroups)  # of a piece of q | k
            pieces = []
            for begin in range(0, 2 * k_dim, size * warpgroups):
                place = begin + wg * size
                is_k = lax.div(place, i32(k_dim))
                pieces.append((place, channels((is_k * h_count + h) * k_dim + place - is_k * k_dim, size)))
            v_piece = channels(2 * config.key_dim + hv * v_dim + wg * own, own)
            rate, shift = (ref[name][hv].astype(f32) for name in ("A_log", "dt_bias"))
            b, a = ([ref["x"][token, config.qkvz_dim + n + hv].astype(f32) for token in tokens] for n in (0, hv_count))

            def gate(token: Array) -> tuple[Array, Array]:
                z = ref["x"].at[token, pl.ds(config.conv_dim + hv * v_dim, v_dim)]
                return load(z, of_row), load(ref["norm_weight"], of_row)

            gates = gate(tokens[0]) if norm_weight is not None and longest == 1 else None

            def convolve(out: Any, place: Any, piece: tuple[Any, ...]) -> None:
                _, size, bias, taps, window = piece
                for t in range(longest):
                    y = taps[0] * window[t]
                    for j in range(1, width):
                        y += taps[j] * window[t + j]
                    y = y if bias is None else y + bias
                    y = y if config.activation is None else y * sigmoid(y)
                    out[t, pl.ds(place, size)] = y.astype(dtype)

            def new_column(j: int, piece: tuple[Any, ...]) -> Array:
                """Column j of the new conv row: of the window of the first new token and on, zeros behind the last."""
                value, t = piece[4][j + 1], j - (width - 2)  # of which token
                value = value if t < 1 else keep(length > t, value, channels_layout(piece[1]))
                return value.astype(conv.dtype)

            convolve(v_sm, wg * own, v_piece)
            for place, piece in pieces:
                convolve(qk_sm, place, piece)
                for j in range(columns):
                    rows_sm[j, pl.ds(place, size)] = new_column(j, piece)
            for j in range(columns):  # v's, which no other CTA reads
                conv_ref[row, pl.ds(v_piece[0], own), j] = new_column(j, v_piece)
            decays = [decay_of(rate, x, shift) for x in a]
            writes = [sigmoid(x) for x in b]
            plgpu.barrier_arrive(convolved)
            plgpu.barrier_wait(convolved)
            for barrier in rows_used:  # one thread arrives for its warpgroup: all of them have to be past their loads
                plgpu.barrier_arrive(barrier)

            for tile in range(tiles):
                if staged:
                    plgpu.barrier_wait(arrived.at[wg, tile])
                    m = plgpu.load(tiles_sm.at[wg, tile], layout=layout).astype(f32)
                elif tile > 0:
                    m = load(state_at(offset, tile), layout)
                if has is not None:
                    m = keep(has, m, layout)
                for t in range(longest):
                    query, key = (load(qk_sm.at[t, pl.ds(first, k_dim)], of_k) for first in (0, k_dim))
                    value = load(v_sm.at[t, columns_of(tile)], of_v)
                    m, o = rule_step(m, query, key, value, decays[t], writes[t], f32(k_dim**-0.5), True, layout)
                    o_sm[t, columns_of(tile)] = o.astype(dtype)
                    target, buffer = state_at(t, tile), tiles_sm.at[wg, tile if t % 2 == 0 else tiles]

                    @pl.when(length > t)  # no token beyond the sequence is followed by a real one
                    def _() -> None:
                        if not staged:
                            target[...] = m.astype(ssm.dtype)
                            return
                        if t > 0:
                            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                        buffer[...] = m.astype(ssm.dtype)
                        plgpu.commit_smem()
                        plgpu.copy_smem_to_gmem(buffer, target)

            for barrier in rows_used:
                plgpu.barrier_wait(barrier)  # also by those who write nothing: others arrive in their shared memory

            @pl.when(member == 0)
            def _() -> None:
                for place, (first, *_) in pieces:
                    for j in range(columns):
                        new = plgpu.load(rows_sm.at[j, pl.ds(place, size)], layout=channels_layout(size), optimized=False)
                        conv_ref[row, pl.ds(first, size), j] = new

            plgpu.barrier_arrive(out_ready)
            plgpu.barrier_wait(out_ready)
            for t in range(longest):

                @pl.when((length > t) & (wg == t % warpgroups))
                def _() -> None:
                    o = load(o_sm.at[t], of_row)
                    if norm_weight is not None:
                        z, w = gates or gate(tokens[t])
                        o *= lax.rsqrt(jnp.sum(o * o) * (1 / v_dim) + ref["norm_eps"][0])
                        o = o.astype(dtype).astype(f32) * w
                        o = o.astype(jnp.promote_types(dtype, norm_weight.dtype)).astype(f32) * (z * sigmoid(z))
                    o_ref[tokens[t], hv] = o.astype(dtype)

            if staged:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        # Zeros for the tokens of padding, and behind the last sequence.
        def zero(token: Array, _: None) -> None:
            o_ref[token, hv] = plgpu.layout_cast(jnp.zeros((v_dim,), dtype), of_row)

        @pl.when(wg == 0)
        def _() -> None:
            lax.fori_loop(jnp.where(valid, end, start), end, zero, None)
            if verify:
                lax.fori_loop(end, jnp.where(i == n - 1, num_tokens, end), zero, None)

    o, conv, ssm = launch(
        body,
        "gdn_decode",
        dict(n=n, h=h_count),
        tuple(given.values()),
        (conv, ssm),
        jax.ShapeDtypeStruct((num_tokens, hv_count, v_dim), dtype),
        (
            plgpu.SMEM((warpgroups, buffers, k_dim, COLUMNS), ssm.dtype, transforms=swizzled(ssm.dtype)),
            plgpu.SMEM((longest, 2 * k_dim), dtype),
            *(plgpu.SMEM((longest, v_dim), dtype) for _ in range(2)),
            plgpu.SMEM((columns, 2 * k_dim), conv.dtype),
            plgpu.Barrier(num_barriers=(warpgroups, tiles)),
            *(plgpu.Barrier(num_arrivals=warpgroups) for _ in range(2)),
            *([plgpu.ClusterBarrier(collective_axes=("member",), num_arrivals=warpgroups)] if per_k_head > 1 else []),
        ),
        cluster=dict(member=per_k_head),
        warpgroups=warpgroups,
    )
    return o, conv, ssm
