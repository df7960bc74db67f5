// Routing of many rows on the device: from router logits to a list of row blocks that a grouped product
// takes, without a word to the host.
//
// choose_rows   the top_k experts of each row and their weights, as one row's (common/choose_experts.h).
//               routing [rows, 2 top_k + shared]: weights | experts | sigmoid of the shared gate, like
//               experts_up. picks [rows, top_k]: expert * 32 + the rows before this one, in its block of 32
//               rows, that chose it too. counts [experts, row blocks]: rows of a block that chose the expert.
//               Launch: ceil(rows / 32) threadgroups of 256 threads.
// lay_out       counts become starts: the place of the first entry of each block and expert.
//               blocks [capacity] are (expert, first entry, rows, 0): at most `tile` rows of one expert; the
//               shared expert's blocks (expert number `experts`) come first, then the others by expert; the
//               rest are sentinels of no rows. capacity = ceil(rows top_k / tile) + min(experts, rows top_k)
//               + shared ceil(rows / tile) is enough for any choice, so the host needs to know none.
//               Launch: one threadgroup of 512 threads.
// scatter_rows  entries [rows top_k + shared rows]: row * slots + slot, sorted by expert, rows ascending; the
//               shared expert's follow at rows top_k. slots = top_k + shared.
//               Launch: ceil(rows slots / 256) threadgroups of 256 threads.
// No order depends on the schedule: a place is a count of smaller rows, not the result of a race.
// Bound: latency; 0.1 % of a layer's bytes.
#include "common/choose_experts.h"

struct RoutingShape {
    uint rows;
    uint experts;
    uint top_k;
    uint normalize;  // routing weights of the chosen experts sum to 1
    uint shared;     // 1 if there is a shared expert
    uint tile;       // rows of a block at most
    uint capacity;   // blocks
};

constant constexpr const uint kRowBlock = 32u;      // rows whose choices fit one mask
constant constexpr const uint kMostExperts = 512u;  // also the threads of lay_out
constant constexpr const uint kChooseSimdgroups = 8u;
constant constexpr const uint kLayOutSimdgroups = 16u;

[[kernel]] void choose_rows(device const float* logits [[buffer(0)]], device float* routing [[buffer(1)]],
                            device uint* picks [[buffer(2)]], device uint* counts [[buffer(3)]],
                            constant RoutingShape& shape [[buffer(4)]],
                            uint block [[threadgroup_position_in_grid]],
                            uint blocks [[threadgroups_per_grid]], uint index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint chosen[1024];
    threadgroup float weights[1024];
    threadgroup atomic_uint takers[512];  // per expert, a bit for each row of the block
    for (uint e = index; e < shape.experts; e += kChooseSimdgroups * 32u) {
        atomic_store_explicit(takers + e, 0u, memory_order_relaxed);
    }
    const uint first = block * kRowBlock;
    const uint count = min(kRowBlock, shape.rows - first);
    const uint stride = 2u * shape.top_k + shape.shared;
    for (uint r = simdgroup; r < count; r += kChooseSimdgroups) {
        device const float* row = logits + (first + r) * (shape.experts + shape.shared);
        choose_experts(row, shape, lane, chosen + r * kMaxTopK, weights + r * kMaxTopK);
        if (shape.shared != 0u && lane == 0u) {
            routing[(first + r) * stride + 2u * shape.top_k] = sigmoid(row[shape.experts]);
        }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < count * shape.top_k; i += kChooseSimdgroups * 32u) {
        const uint r = i / shape.top_k;
        const uint expert = chosen[r * kMaxTopK + i % shape.top_k];
        atomic_fetch_or_explicit(takers + expert, 1u << r, memory_order_relaxed);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = index; i < count * shape.top_k; i += kChooseSimdgroups * 32u) {
        const uint r = i / shape.top_k;
        const uint slot = i % shape.top_k;
        const uint expert = chosen[r * kMaxTopK + slot];
        const uint before = atomic_load_explicit(takers + expert, memory_order_relaxed) & ((1u << r) - 1u);
        picks[first * shape.top_k + i] = expert * kRowBlock + popcount(before);
        device float* target = routing + (first + r) * stride;
        target[slot] = weights[r * kMaxTopK + slot];
        target[shape.top_k + slot] = float(expert);
    }
    for (uint e = index; e < shape.experts; e += kChooseSimdgroups * 32u) {
        counts[e * blocks + block] = popcount(atomic_load_explicit(takers + e, memory_order_relaxed));
    }
}

[[kernel]] void lay_out(device uint* counts [[buffer(0)]], device uint4* blocks [[buffer(1)]],
                        constant RoutingShape& shape [[buffer(2)]],
                        uint index [[thread_index_in_threadgroup]],
                        uint simdgroup [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint totals[512];
    threadgroup uint firsts[512];  // first entry of an expert
    threadgroup uint tiles[512];   // first block of an expert
    threadgroup uint sums[32];
    const uint row_blocks = (shape.rows + kRowBlock - 1u) / kRowBlock;
    for (uint e = simdgroup; e < shape.experts; e += kLayOutSimdgroups) {
        uint total = 0u;
        for (uint b = lane; b < row_blocks; b += 32u) total += counts[e * row_blocks + b];
        total = simd_sum(total);
        if (lane == 0u) totals[e] = total;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // A thread is an expert: prefix sums of entries and of blocks.
    const uint mine = index < shape.experts ? totals[index] : 0u;
    const uint own_tiles = (mine + shape.tile - 1u) / shape.tile;
    uint first = simd_prefix_exclusive_sum(mine);
    uint tile = simd_prefix_exclusive_sum(own_tiles);
    if (lane == 31u) {
        sums[simdgroup] = first + mine;
        sums[kLayOutSimdgroups + simdgroup] = tile + own_tiles;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint shared_tiles = shape.shared != 0u ? (shape.rows + shape.tile - 1u) / shape.tile : 0u;
    tile += shared_tiles;
    uint used = shared_tiles;
    for (uint s = 0u; s < kLayOutSimdgroups; ++s) {
        if (s < simdgroup) {
            first += sums[s];
            tile += sums[kLayOutSimdgroups + s];
        }
        used += sums[kLayOutSimdgroups + s];
    }
    firsts[index] = first;
    tiles[index] = tile;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint e = simdgroup; e < shape.experts; e += kLayOutSimdgroups) {
        uint place = firsts[e];
        for (uint begin = 0u; begin < row_blocks; begin += 32u) {
            const uint b = begin + lane;
            const uint count = b < row_blocks ? counts[e * row_blocks + b] : 0u;
            const uint before = simd_prefix_exclusive_sum(count);
            if (b < row_blocks) counts[e * row_blocks + b] = place + before;
            place += simd_sum(count);
        }
        const uint total = totals[e];
        for (uint t = lane; t * shape.tile < total; t += 32u) {
            const uint at = t * shape.tile;
            blocks[tiles[e] + t] = uint4(e, firsts[e] + at, min(shape.tile, total - at), 0u);
        }
    }
    for (uint t = index; t < shared_tiles; t += kMostExperts) {
        const uint at = t * shape.tile;
        const uint entry = shape.rows * shape.top_k + at;
        blocks[t] = uint4(shape.experts, entry, min(shape.tile, shape.rows - at), 0u);
    }
    for (uint t = used + index; t < shape.capacity; t += kMostExperts) blocks[t] = uint4(0u);
}

[[kernel]] void scatter_rows(device const uint* picks [[buffer(0)]], device const uint* starts [[buffer(1)]],
                             device uint* entries [[buffer(2)]], constant RoutingShape& shape [[buffer(3)]],
                             uint i [[thread_position_in_grid]]) {
    const uint slots = shape.top_k + shape.shared;
    if (i >= shape.rows * slots) return;
    const uint row = i / slots;
    const uint slot = i % slots;
    if (slot == shape.top_k) {
        entries[shape.rows * shape.top_k + row] = i;
        return;
    }
    const uint pick = picks[row * shape.top_k + slot];
    const uint row_blocks = (shape.rows + kRowBlock - 1u) / kRowBlock;
    entries[starts[pick / kRowBlock * row_blocks + row / kRowBlock] + pick % kRowBlock] = i;
}
