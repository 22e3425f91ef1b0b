// Stable compaction in one pass: decoupled look-back (Merrill & Garland, 2016).
//
// Blocks take tiles by ticket, so a tile's predecessors are always running or done. A block publishes first the aggregate of
// its tile, then the inclusive prefix. Looking back over these words gives a tile's exclusive prefix. Each word contains its
// flag and publishes nothing but itself, so relaxed loads and stores suffice.
//
// The last block resets the state to zeros for the next kernel. Deterministic: sums of integers.
#pragma once

#include "scan.cuh"

namespace sparsecomm {

// In device memory: one status per tile.
struct LookBack {
    u32 ticket;                // tiles taken
    OWN_LINE u32 blocks_done;  // finished blocks
    OWN_LINE u64 status[1];    // of each tile: 0, AGGREGATE + its count, or INCLUSIVE + the inclusive prefix
};
static_assert(sizeof(LookBack) == LOOK_BACK_BYTES, "as in sparsecomm/backends/cuda/modules.py");

#ifndef LOOK_BACK_WINDOWS
#define LOOK_BACK_WINDOWS 4
#endif
constexpr u32 WINDOWS = LOOK_BACK_WINDOWS;  // loaded at once; a window is one tile per lane
constexpr u64 AGGREGATE = 1ull << 62, INCLUSIVE = 2ull << 62, SUM = AGGREGATE - 1;  // flags, and 62 bits of a sum

// Returns the tile of this block. All threads call it.
DEVICE u32 tile_ticket(LookBack* state) {
    SHARED(u32, tile);
    if (threadIdx.x == 0) tile = atomicAdd(&state->ticket, 1u);
    __syncthreads();
    return tile;
}

// Publishes the aggregate of a tile. Call it before waiting for anything. One thread calls it.
DEVICE void publish(LookBack* state, u32 tile, u64 own) {
    store_relaxed(&state->status[tile], (tile == 0 ? INCLUSIVE : AGGREGATE) | own);
}

// Returns the exclusive prefix of a tile, after `publish`. All threads call it.
//
//   state  [in,out]  all zeros before the first tile
//   tile   [in]      from `tile_ticket`
//   own    [in]      the aggregate of this tile
DEVICE u64 prefix_before(LookBack* state, u32 tile, u64 own) {
    SHARED(u64, base);
    if (threadIdx.x < WARP) {
        const u32 lane = threadIdx.x;
        u64 before = 0;  // this lane's part of the prefix
        bool ended = false;
        for (i64 end = tile; end > 0 && !ended; end -= WINDOWS * WARP) {  // lane 0 has the nearest tile of each window
            u64 word[WINDOWS];
            UNROLL
            for (u32 w = 0; w < WINDOWS; w++) {
                const i64 t = end - 1 - i64(w * WARP + lane);
                word[w] = t < 0 ? INCLUSIVE : load_relaxed(&state->status[t]);
            }
            UNROLL
            for (u32 w = 0; w < WINDOWS; w++) {
                if (ended) continue;
                while (__any_sync(ALL_LANES, word[w] == 0)) {
                    pause();
                    if (word[w] == 0) word[w] = load_relaxed(&state->status[end - 1 - i64(w * WARP + lane)]);
                }
                const u32 inclusive = __ballot_sync(ALL_LANES, word[w] >= INCLUSIVE);
                const u32 last = inclusive ? u32(__ffs(int(inclusive))) - 1 : WARP - 1;
                before += lane <= last ? word[w] & SUM : 0ull;
                ended = inclusive != 0;
            }
        }
        before = warp_sum(before);
        if (lane == 0) {
            if (tile > 0) store_relaxed(&state->status[tile], INCLUSIVE | (before + own));
            base = before;
        }
    }
    __syncthreads();
    return base;
}

// Calls `publish`, then `prefix_before`. All threads call it.
DEVICE u64 exclusive_prefix(LookBack* state, u32 tile, u64 own) {
    if (threadIdx.x == 0) publish(state, tile, own);
    return prefix_before(state, tile, own);
}

// Returns whether this block is the last of the grid to call this; it then sees all writes that other blocks made before
// their call. All threads call it.
//
//   blocks_done  [in,out]  0 before the first call and after the last
DEVICE bool is_last_block(u32* blocks_done) {
    SHARED(bool, last);
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        last = atomicAdd(blocks_done, 1u) == gridDim.x - 1;
        if (last) *blocks_done = 0;
    }
    __syncthreads();
    __threadfence();
    return last;
}

// Takes the next part of a kernel whose blocks work in steps; a step has one part per block. Waits for the step before,
// and sees its writes. Running blocks have then taken all its parts. All threads call it.
//
//   ticket      [in,out]  parts taken, in all steps
//   steps_done  [in]      completed steps
DEVICE u32 take_part(u32* ticket, const u32* steps_done) {
    SHARED(u32, taken);  // no thread still reads the previous ticket, because every step ends with a barrier
    if (threadIdx.x == 0) {
        taken = atomicAdd(ticket, 1u);
        while (load_acquire(steps_done) < taken / gridDim.x) pause();
        __threadfence();
    }
    __syncthreads();
    return taken % gridDim.x;
}

// Ends the current step, whose results thread 0 has written. All threads of its last block call it.
DEVICE void end_step(u32* steps_done) {
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        atomicAdd(steps_done, 1u);
    }
}

// Ends a kernel with `tiles` tiles: in the last block, sets the state to zeros and returns true. All threads call it.
DEVICE bool reset_after_last_block(LookBack* state, u32 tiles) {
    if (!is_last_block(&state->blocks_done)) return false;
    for (u32 t = threadIdx.x; t < tiles; t += blockDim.x) state->status[t] = 0;
    if (threadIdx.x == 0) state->ticket = 0;
    return true;
}

}  // namespace sparsecomm
