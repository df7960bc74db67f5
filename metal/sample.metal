// Choice of the next token by chance, on the device: two launches in place of `argmax`, each row by itself.
//
// adjust_logits  penalties, bias and mask of the rows that ask for them, in place, and the partial choices of
//                `head` again. Per logit l of a token that occurred c > 0 times:
//                l <- (l > 0 ? l / repetition : l repetition) - presence - frequency c;  then l += bias;
//                then minus infinity where the mask has no bit.
//                Launch: (ceil(groups / 8), rows) threadgroups of 256 threads; a simdgroup per partial.
// sample_bins    histogram of a row's distances d = (top - l) / temperature: tokens and probability mass
//                per 1/36, by integer atomics; of each slice of 4,096 tokens the lowest bin and the mass.
//                Launch: (ceil(vocabulary / 4096), rows) threadgroups of 256 threads.
// sample         temperature, top-k, min-p, top-p and the draw; temperature 0 is `argmax`. Then the token's
//                count goes up by one if the row has penalties, and positions[row] += advance.
//                Launch: rows threadgroups of 512 threads.
//
// Mass: a token weighs floor(2^40 e^-d), an integer, so that sums are exact and their order can't show; what
// weighs nothing (d > 27.7) is never drawn, 2e-7 of a whole vocabulary at most. Order: larger logits first,
// the lower token among equals. Every filter keeps a first part of that order:
//   top-k  the k first;  top-p  the fewest whose mass reaches top_p times that of the k first;
//   min-p  those with d <= -log(min_p).
// sample finds the bin in which the cut lies. Up to 1,024 tokens to its end are collected from the slices
// that have some, and sorted in threadgroup memory. If there are more, the cut is found exactly by five
// passes over the row, ten bits of (logit, token) each, and the draw takes a pass; without a cut the draw
// reads one slice. Memory beside the logits: 13 KiB a row.
// Chance: 64 bits of Philox, key the row's seed, counter (position, stream): no draw depends on other rows.
// Bound: reading a row once by all threadgroups, then a few slices, at worst eleven times the row, by one.
#include "common/philox.h"

struct SampleShape {
    uint vocabulary;  // tokens that may be drawn, at most 2^18
    uint stride;      // logits of a row
    uint groups;      // partial choices of a row, as `head` leaves them
    uint group_size;  // logits of a partial choice: 64, for more than four rows of `head` 32
    uint advance;     // of positions
};

struct SampleOptions {  // of a row
    float temperature;  // 0: the largest logit
    uint top_k;         // 0: off
    float top_p;        // 1: off
    float min_p;        // 0: off
    uint seed_low;
    uint seed_high;
    uint stream;  // tells apart draws for different purposes at one position
    uint adjust;  // kPenalties | kBias | kMask
    float repetition;
    float presence;
    float frequency;
};

constant constexpr const uint kPenalties = 1u;
constant constexpr const uint kBias = 2u;
constant constexpr const uint kMask = 4u;
constant constexpr const uint kBins = 1024u;
constant constexpr const uint kSlice = 4096u;      // tokens of a threadgroup of sample_bins
constant constexpr const uint kSlices = 64u;       // of the largest vocabulary
constant constexpr const uint kBatch = 8u;         // logits of a thread that are loaded before one is used
constant constexpr const uint kCollected = 1024u;  // tokens that are sorted
constant constexpr const uint kThreads = 512u;     // of sample
constant constexpr const uint kNotANumber = 0xffffffffu;

// Words of a row of bins: tokens, low and high word of the mass by bin; lowest bin and mass by slice.
constant constexpr const uint kSliceWords = 3u * kBins;
constant constexpr const uint kRowWords = kSliceWords + 3u * kSlices;

inline float distance_to(float top, float logit, float inverse) {
    return logit == top ? 0.0f : (top - logit) * inverse;
}

inline uint bin_of(float distance) { return uint(min(distance * 36.0f, float(kBins - 1u))); }

// floor(2^40 e^-distance)
inline ulong mass_of(float distance) {
    const float scaled = exp(-distance) * 1048576.0f;
    const uint high = uint(scaled);
    const uint low = uint((scaled - float(high)) * 1048576.0f);
    return (ulong(high) << 20) + ulong(low);
}

// The best of a row's partial choices, by all threads; candidates has 32 entries.
inline uint2 best_choice(device const uint2* best, uint groups, uint index, uint threads, uint simdgroup,
                         uint lane, threadgroup uint2* candidates) {
    uint key = 0u;
    uint token = 0xffffffffu;
#pragma clang loop unroll_count(4)
    for (uint i = index; i < groups; i += threads) {
        const uint2 other = best[i];
        if (other.x > key || (other.x == key && other.y < token)) {
            key = other.x;
            token = other.y;
        }
    }
    uint top = simd_max(key);
    token = simd_min(key == top ? token : 0xffffffffu);
    if (lane == 0u) candidates[simdgroup] = uint2(top, token);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint2 mine = candidates[lane < threads / 32u ? lane : 0u];
    top = simd_max(mine.x);
    return uint2(top, simd_min(mine.x == top ? mine.y : 0xffffffffu));
}

[[kernel]] void adjust_logits(device float* logits [[buffer(0)]], device uint2* best [[buffer(1)]],
                              device const SampleOptions* options [[buffer(2)]],
                              device const uint* sequences [[buffer(3)]],
                              device const uint* counts [[buffer(4)]], device const float* bias [[buffer(5)]],
                              device const uint* mask [[buffer(6)]],
                              constant SampleShape& shape [[buffer(7)]],
                              uint3 position [[threadgroup_position_in_grid]],
                              uint simdgroup [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
    const uint row = position.y;
    const uint group = position.x * 8u + simdgroup;
    const uint adjust = options[row].adjust;
    if (adjust == 0u || group >= shape.groups) return;
    const uint sequence = sequences[row];
    device const uint* occurred = counts + sequence * shape.vocabulary;
    device const float* added = bias + sequence * shape.vocabulary;
    device const uint* words = mask + sequence * ((shape.vocabulary + 31u) / 32u);
    uint key = 0u;
    uint token = 0xffffffffu;
    for (uint i = lane; i < shape.group_size; i += 32u) {
        const uint t = group * shape.group_size + i;
        if (t >= shape.vocabulary) break;
        float logit = logits[row * shape.stride + t];
        const uint count = (adjust & kPenalties) != 0u ? occurred[t] : 0u;
        if (count > 0u) {
            // Each operation is rounded, as on the host: fma with zero leaves the compiler no choice.
            const float factor = options[row].repetition;
            logit = logit > 0.0f ? logit / factor : fma(logit, factor, 0.0f);
            logit -= options[row].presence + fma(options[row].frequency, float(count), 0.0f);
        }
        if ((adjust & kBias) != 0u) logit += added[t];
        if ((adjust & kMask) != 0u && ((words[t / 32u] >> (t % 32u)) & 1u) == 0u) logit = -INFINITY;
        logits[row * shape.stride + t] = logit;
        const uint other = order_key(logit);
        if (other > key) {
            key = other;
            token = t;
        }
    }
    const uint top = simd_max(key);
    token = simd_min(key == top ? token : 0xffffffffu);
    if (lane == 0u) best[row * shape.groups + group] = uint2(top, token);
}

// Logits first, first + step, ... below `end`; minus infinity beyond.
inline void load_batch(device const float* logits, uint first, uint step, uint end, thread float* batch) {
#pragma clang loop unroll(full)
    for (uint i = 0u; i < kBatch; ++i) {
        const uint token = first + i * step;
        const float logit = logits[min(token, end - 1u)];
        batch[i] = token < end ? logit : -INFINITY;
    }
}

// bin += mass, in two words.
inline void add_mass(threadgroup atomic_uint* low, threadgroup atomic_uint* high, ulong mass) {
    const uint added = uint(mass);
    const uint before = atomic_fetch_add_explicit(low, added, memory_order_relaxed);
    const uint carried = uint(mass >> 32) + (before + added < before ? 1u : 0u);
    if (carried > 0u) atomic_fetch_add_explicit(high, carried, memory_order_relaxed);
}

[[kernel]] void sample_bins(device const float* logits [[buffer(0)]], device const uint2* best [[buffer(1)]],
                            device const SampleOptions* options [[buffer(2)]],
                            device atomic_uint* bins [[buffer(3)]], constant SampleShape& shape [[buffer(4)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint3 size [[threads_per_threadgroup]],
                            uint index [[thread_index_in_threadgroup]],
                            uint simdgroup [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint2 candidates[32];
    threadgroup atomic_uint own[3u * kBins];  // tokens, low and high word of the mass
    threadgroup atomic_uint slice[3];         // lowest bin, mass
    const uint row = group.y;
    const uint threads = size.x;
    const float temperature = options[row].temperature;
    if (temperature <= 0.0f) return;
    for (uint i = index; i < 3u * kBins; i += threads) {
        atomic_store_explicit(own + i, 0u, memory_order_relaxed);
    }
    if (index < 3u) atomic_store_explicit(slice + index, index == 0u ? kBins : 0u, memory_order_relaxed);
    const uint key =
        best_choice(best + row * shape.groups, shape.groups, index, threads, simdgroup, lane, candidates).x;
    if (key == kNotANumber) return;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float top = key_value(key);
    const float inverse = 1.0f / temperature;
    const uint end = min((group.x + 1u) * kSlice, shape.vocabulary);
    ulong total = 0ul;
    for (uint first = group.x * kSlice + index; first < end; first += kBatch * threads) {
        float batch[kBatch];
        load_batch(logits + row * shape.stride, first, threads, end, batch);
#pragma clang loop unroll(full)
        for (uint i = 0u; i < kBatch; ++i) {
            const float distance = distance_to(top, batch[i], inverse);
            const ulong mass = mass_of(distance);
            if (mass == 0ul) continue;
            const uint bin = bin_of(distance);
            total += mass;
            atomic_fetch_min_explicit(slice, bin, memory_order_relaxed);
            atomic_fetch_add_explicit(own + bin, 1u, memory_order_relaxed);
            add_mass(own + kBins + bin, own + 2u * kBins + bin, mass);
        }
    }
    if (total > 0ul) add_mass(slice + 1, slice + 2, total);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    device atomic_uint* all = bins + row * kRowWords;
    if (index < 3u) {
        const uint word = atomic_load_explicit(slice + index, memory_order_relaxed);
        atomic_store_explicit(all + kSliceWords + index * kSlices + group.x, word, memory_order_relaxed);
    }
    for (uint bin = index; bin < kBins; bin += threads) {
        const uint count = atomic_load_explicit(own + bin, memory_order_relaxed);
        if (count == 0u) continue;
        atomic_fetch_add_explicit(all + bin, count, memory_order_relaxed);
        const uint low = atomic_load_explicit(own + kBins + bin, memory_order_relaxed);
        const uint high = atomic_load_explicit(own + 2u * kBins + bin, memory_order_relaxed);
        const uint before = atomic_fetch_add_explicit(all + kBins + bin, low, memory_order_relaxed);
        const uint carried = high + (before + low < before ? 1u : 0u);
        if (carried > 0u) {
            atomic_fetch_add_explicit(all + 2u * kBins + bin, carried, memory_order_relaxed);
        }
    }
}

// The sum of the values of this and all earlier threads; totals has 32 entries.
inline ulong running_sum(ulong value, uint simdgroup, uint lane, threadgroup ulong* totals) {
#pragma clang loop unroll(full)
    for (uint distance = 1u; distance < 32u; distance *= 2u) {
        const uint low = simd_shuffle_up(uint(value), ushort(distance));
        const uint high = simd_shuffle_up(uint(value >> 32), ushort(distance));
        if (lane >= distance) value += (ulong(high) << 32) + ulong(low);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (lane == 31u) totals[simdgroup] = value;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint s = 0u; s < simdgroup; ++s) value += totals[s];
    return value;
}

// ceil(share total) for a share below 1, at least 1: the mass that top-p has to reach.
inline ulong share_of(float share, ulong total) {
    const ulong fraction = ulong(uint(share * 4294967296.0f));
    const ulong low = (total & 0xfffffffful) * fraction;
    const ulong part = (total >> 32) * fraction + (low >> 32) + ((low & 0xfffffffful) != 0ul ? 1ul : 0ul);
    return part > 0ul ? part : 1ul;
}

// floor(total random / 2^64)
inline ulong part_of(ulong total, ulong random) {
    const ulong total_high = total >> 32;
    const ulong total_low = total & 0xfffffffful;
    const ulong high = random >> 32;
    const ulong low = random & 0xfffffffful;
    const ulong a = high * total_low;
    const ulong b = low * total_high;
    const ulong c = (a & 0xfffffffful) + (b & 0xfffffffful) + ((low * total_low) >> 32);
    return high * total_high + (a >> 32) + (b >> 32) + (c >> 32);
}

// (larger logit, lower token) first: 32 and 18 bits.
inline ulong rank_of(uint key, uint token) { return (ulong(~key) << 18) + ulong(token); }

// Whether (key, token) a comes before b.
inline bool before(uint2 a, uint2 b) { return a.x > b.x || (a.x == b.x && a.y < b.y); }

// What the passes over a row share.
struct RowView {
    device const float* logits;
    uint vocabulary;
    float top;
    float inverse;
    float farthest;  // distance that min-p allows
};

// Mass of a token if its rank is at most `last` and min-p keeps it.
inline ulong kept_mass(thread const RowView& row, float logit, uint token, ulong last) {
    const float distance = distance_to(row.top, logit, row.inverse);
    if (distance > row.farthest || rank_of(order_key(logit), token) > last) return 0ul;
    return mass_of(distance);
}

// Rank of the token at which the running number of tokens reaches `tokens`, or their running mass `mass` (if
// tokens is 0), and the mass to there. bins has 3 kBins entries, found 3.
inline ulong find_rank(thread const RowView& row, uint tokens, ulong mass, uint index, uint simdgroup,
                       uint lane, threadgroup atomic_uint* bins, threadgroup ulong* totals,
                       threadgroup ulong* found, thread ulong& reached) {
    ulong rank = 0ul;
    ulong count_before = 0ul;
    ulong mass_before = 0ul;
    for (int shift = 40; shift >= 0; shift -= 10) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint i = index; i < 3u * kBins; i += kThreads) {
            atomic_store_explicit(bins + i, 0u, memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (uint start = index; start < row.vocabulary; start += kBatch * kThreads) {
            float batch[kBatch];
            load_batch(row.logits, start, kThreads, row.vocabulary, batch);
#pragma clang loop unroll(full)
            for (uint i = 0u; i < kBatch; ++i) {
                const ulong own = rank_of(order_key(batch[i]), start + i * kThreads);
                if (shift < 40 && (own >> (shift + 10)) != rank) continue;
                const ulong weight = mass_of(distance_to(row.top, batch[i], row.inverse));
                if (weight == 0ul) continue;
                const uint bin = uint(own >> shift) & (kBins - 1u);
                atomic_fetch_add_explicit(bins + bin, 1u, memory_order_relaxed);
                add_mass(bins + kBins + bin, bins + 2u * kBins + bin, weight);
            }
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        ulong count[2];
        ulong weight[2];
#pragma clang loop unroll(full)
        for (int i = 0; i < 2; ++i) {
            const uint bin = 2u * index + uint(i);
            count[i] = ulong(atomic_load_explicit(bins + bin, memory_order_relaxed));
            const uint low = atomic_load_explicit(bins + kBins + bin, memory_order_relaxed);
            const uint high = atomic_load_explicit(bins + 2u * kBins + bin, memory_order_relaxed);
            weight[i] = (ulong(high) << 32) + ulong(low);
        }
        ulong counted =
            count_before + running_sum(count[0] + count[1], simdgroup, lane, totals) - count[0] - count[1];
        ulong weighed =
            mass_before + running_sum(weight[0] + weight[1], simdgroup, lane, totals) - weight[0] - weight[1];
#pragma clang loop unroll(full)
        for (int i = 0; i < 2; ++i) {
            const bool first = tokens > 0u ? counted < ulong(tokens) && counted + count[i] >= ulong(tokens)
                                           : weighed < mass && weighed + weight[i] >= mass;
            if (first) {
                found[0] = (rank << 10) + ulong(2u * index + uint(i));
                found[1] = counted;
                found[2] = weighed;
                if (shift == 0) found[2] = weighed + weight[i];
            }
            counted += count[i];
            weighed += weight[i];
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        rank = found[0];
        count_before = found[1];
        mass_before = found[2];
    }
    reached = mass_before;
    return rank;
}

// The token of [begin, end) that 64 random bits choose among those of rank up to `last` that min-p keeps.
// Where the mass of the whole row is known, and that of the tokens before `begin`, the range is one that they
// chose.
inline uint draw_from(thread const RowView& row, uint begin, uint end, ulong last, ulong random, ulong known,
                      ulong skipped, uint index, uint simdgroup, uint lane, threadgroup ulong* totals,
                      threadgroup ulong* found) {
    ulong own = 0ul;
    for (uint start = begin + index; start < end; start += kBatch * kThreads) {
        float batch[kBatch];
        load_batch(row.logits, start, kThreads, end, batch);
#pragma clang loop unroll(full)
        for (uint i = 0u; i < kBatch; ++i) own += kept_mass(row, batch[i], start + i * kThreads, last);
    }
    ulong sum = running_sum(own, simdgroup, lane, totals);
    if (index == kThreads - 1u) found[0] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    ulong wanted = part_of(known > 0ul ? known : found[0], random) - skipped;
    if (sum - own <= wanted && wanted < sum) {
        found[1] = ulong(index);
        found[2] = wanted - (sum - own);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // The chosen thread's tokens, one each.
    const uint token = begin + uint(found[1]) + kThreads * index;
    wanted = found[2];
    own = token < end ? kept_mass(row, row.logits[token], token, last) : 0ul;
    sum = running_sum(own, simdgroup, lane, totals);
    if (sum - own <= wanted && wanted < sum) found[0] = ulong(token);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    return uint(found[0]);
}

[[kernel]] void sample(device const float* logits [[buffer(0)]], device const uint2* best [[buffer(1)]],
                       device const SampleOptions* options [[buffer(2)]], device uint* bins [[buffer(3)]],
                       device uint* tokens [[buffer(4)]], device uint* keys [[buffer(5)]],
                       device uint* positions [[buffer(6)]], device const uint* sequences [[buffer(7)]],
                       device uint* counts [[buffer(8)]], constant SampleShape& shape [[buffer(9)]],
                       uint row [[threadgroup_position_in_grid]], uint index [[thread_index_in_threadgroup]],
                       uint simdgroup [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
    threadgroup uint2 candidates[32];
    threadgroup uint4 memory[768];  // three bins of kBins words, or kCollected pairs
    threadgroup ulong totals[32];
    threadgroup ulong found[4];
    threadgroup atomic_uint limit;
    const float temperature = options[row].temperature;
    if (index == 0u) {
        const uint2 seed = uint2(options[row].seed_low, options[row].seed_high);
        const uint4 random = philox(uint4(positions[row], options[row].stream, 0u, 0u), seed);
        found[3] = (ulong(random.x) << 32) + ulong(random.y);
    }
    const uint2 choice =
        best_choice(best + row * shape.groups, shape.groups, index, kThreads, simdgroup, lane, candidates);
    uint token = choice.y;
    if (temperature > 0.0f && choice.x != kNotANumber) {
        const ulong random = found[3];
        const uint top_k = options[row].top_k;
        const float top_p = options[row].top_p;
        const float min_p = options[row].min_p;
        RowView view;
        view.logits = logits + row * shape.stride;
        view.vocabulary = shape.vocabulary;
        view.top = key_value(choice.x);
        view.inverse = 1.0f / temperature;
        view.farthest = min_p > 0.0f ? -log(min_p) : INFINITY;
        // The last bin that matters, and the tokens to its end. Bins are left empty for the next step.
        ulong count[2];
        ulong weight[2];
        device uint* row_bins = bins + row * kRowWords;
        device const uint* slices = row_bins + kSliceWords;
#pragma clang loop unroll(full)
        for (int i = 0; i < 2; ++i) {
            device uint* bin = row_bins + 2u * index + uint(i);
            count[i] = ulong(bin[0]);
            weight[i] = (ulong(bin[2u * kBins]) << 32) + ulong(bin[kBins]);
            bin[0] = 0u;
            bin[kBins] = 0u;
            bin[2u * kBins] = 0u;
        }
        const ulong counted = running_sum(count[0] + count[1], simdgroup, lane, totals);
        const ulong weighed = running_sum(weight[0] + weight[1], simdgroup, lane, totals);
        if (index == kThreads - 1u) {
            found[0] = counted;
            found[1] = weighed;
        }
        if (index == 0u) atomic_store_explicit(&limit, kBins - 1u, memory_order_relaxed);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const ulong all_mass = found[1];
        const bool limited = top_k > 0u && ulong(top_k) < found[0];
        const ulong all_share = top_p < 1.0f ? share_of(top_p, all_mass) : all_mass;
        // Both bins of a thread reach what they hold together; the first that reaches the cut is the last
        // one.
        const ulong count_to[2] = {counted - count[1], counted};
        const ulong weight_to[2] = {weighed - weight[1], weighed};
#pragma clang loop unroll(full)
        for (int i = 1; i >= 0; --i) {
            const bool reaches = limited ? count_to[i] >= ulong(top_k) : weight_to[i] >= all_share;
            if (reaches) {
                atomic_fetch_min_explicit(&limit, 2u * index + uint(i), memory_order_relaxed);
            }
        }
        if (!limited && index == 0u) {
            atomic_fetch_min_explicit(&limit, bin_of(view.farthest), memory_order_relaxed);
        }
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint last_bin = atomic_load_explicit(&limit, memory_order_relaxed);
        if (last_bin / 2u == index) found[2] = count_to[last_bin % 2u];
        threadgroup_barrier(mem_flags::mem_threadgroup);
        const uint size = uint(found[2]);
        if (size <= kCollected) {
            threadgroup uint2* list = (threadgroup uint2*)memory;
            uint room = 2u;
            while (room < size) room *= 2u;
            for (uint i = index; i < room; i += kThreads) list[i] = uint2(0u, 0xffffffffu);
            if (index == 0u) atomic_store_explicit(&limit, 0u, memory_order_relaxed);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            // Slices with tokens to collect, a bit each.
            const uint2 found_in =
                uint2(simd_or(lane * kSlice < shape.vocabulary && slices[lane] <= last_bin ? 1u << lane : 0u),
                      simd_or((lane + 32u) * kSlice < shape.vocabulary && slices[lane + 32u] <= last_bin
                                  ? 1u << lane
                                  : 0u));
            for (uint slice = 0u; slice < kSlices; ++slice) {
                if (((slice < 32u ? found_in.x : found_in.y) >> (slice % 32u) & 1u) == 0u) continue;
                const uint begin = slice * kSlice;
                float batch[kBatch];
                const uint end = min(begin + kSlice, shape.vocabulary);
                load_batch(view.logits, begin + index, kThreads, end, batch);
#pragma clang loop unroll(full)
                for (uint i = 0u; i < kBatch; ++i) {
                    const float distance = distance_to(view.top, batch[i], view.inverse);
                    if (bin_of(distance) <= last_bin && mass_of(distance) > 0ul) {
                        const uint place = atomic_fetch_add_explicit(&limit, 1u, memory_order_relaxed);
                        if (place < room) {
                            list[place] = uint2(order_key(batch[i]), begin + index + i * kThreads);
                        }
                    }
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            for (uint run = 2u; run <= room; run *= 2u) {  // bitonic
                for (uint step = run / 2u; step > 0u; step /= 2u) {
                    if (index < room / 2u) {
                        const uint a = index / step * 2u * step + index % step;
                        const uint2 x = list[a];
                        const uint2 y = list[a + step];
                        if (before(y, x) == ((a & run) == 0u)) {
                            list[a] = y;
                            list[a + step] = x;
                        }
                    }
                    threadgroup_barrier(mem_flags::mem_threadgroup);
                }
            }
            const uint kept = limited ? top_k : size;
            float distance[2];
            ulong own[2];
#pragma clang loop unroll(full)
            for (int i = 0; i < 2; ++i) {
                const uint at = 2u * index + uint(i);
                distance[i] = at < size ? distance_to(view.top, key_value(list[at].x), view.inverse) : 0.0f;
                own[i] = at < size ? mass_of(distance[i]) : 0ul;
            }
            const ulong end = running_sum(own[0] + own[1], simdgroup, lane, totals);
            const ulong start[2] = {end - own[1] - own[0], end - own[1]};
            if (index == 0u) {
                atomic_store_explicit(&limit, kept, memory_order_relaxed);
                found[0] = all_mass;
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (limited && (kept - 1u) / 2u == index) {
                found[0] = start[(kept - 1u) % 2u] + own[(kept - 1u) % 2u];
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            const ulong target = top_p < 1.0f ? share_of(top_p, found[0]) : found[0];
#pragma clang loop unroll(full)
            for (int i = 0; i < 2; ++i) {
                const uint at = 2u * index + uint(i);
                if (at < size && (start[i] >= target || distance[i] > view.farthest)) {
                    atomic_fetch_min_explicit(&limit, at, memory_order_relaxed);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            const uint last = atomic_load_explicit(&limit, memory_order_relaxed) - 1u;
            if (last / 2u == index) found[1] = start[last % 2u] + own[last % 2u];
            threadgroup_barrier(mem_flags::mem_threadgroup);
            const ulong wanted = part_of(found[1], random);
#pragma clang loop unroll(full)
            for (int i = 0; i < 2; ++i) {
                if (start[i] <= wanted && wanted < start[i] + own[i]) {
                    found[2] = ulong(list[2u * index + uint(i)].y);
                }
            }
            threadgroup_barrier(mem_flags::mem_threadgroup);
            token = uint(found[2]);
        } else {
            threadgroup atomic_uint* counters = (threadgroup atomic_uint*)memory;
            ulong last = 0xfffffffffffffffful;
            ulong reached = all_mass;
            if (limited) {
                last = find_rank(view, top_k, 0ul, index, simdgroup, lane, counters, totals, found, reached);
            }
            if (top_p < 1.0f) {
                last = find_rank(view, 0u, share_of(top_p, reached), index, simdgroup, lane, counters, totals,
                                 found, reached);
            }
            uint begin = 0u;
            uint end = shape.vocabulary;
            ulong known = 0ul;
            ulong skipped = 0ul;
            if (!limited && top_p >= 1.0f && min_p <= 0.0f) {
                // The slice in which the random number falls.
                known = all_mass;
                const ulong wanted = part_of(all_mass, random);
                const bool present = index < kSlices && index * kSlice < shape.vocabulary;
                const uint slice = present ? index : 0u;
                const ulong mass =
                    present ? (ulong(slices[2u * kSlices + slice]) << 32) + ulong(slices[kSlices + slice])
                            : 0ul;
                const ulong sum = running_sum(mass, simdgroup, lane, totals);
                if (sum - mass <= wanted && wanted < sum) {
                    found[0] = ulong(slice * kSlice);
                    found[1] = sum - mass;
                }
                threadgroup_barrier(mem_flags::mem_threadgroup);
                begin = uint(found[0]);
                skipped = found[1];
                end = min(begin + kSlice, shape.vocabulary);
            }
            token = draw_from(view, begin, end, last, random, known, skipped, index, simdgroup, lane, totals,
                              found);
        }
    }
    if (index == 0u) {
        tokens[row] = token;
        keys[row] = choice.x;
        positions[row] = positions[row] + shape.advance;
        if ((options[row].adjust & kPenalties) != 0u && token < shape.vocabulary) {
            device uint* count = counts + sequences[row] * shape.vocabulary + token;
            *count = *count + 1u;
        }
    }
}
