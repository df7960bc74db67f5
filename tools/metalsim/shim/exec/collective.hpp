// simdgroup and quadgroup functions. The lanes meet; the last to arrive computes the results of all.
#pragma once
#include "barrier.hpp"
#include "math.hpp"

namespace msl::metal {
namespace detail {

// The values that lanes bring to a collective and take away from it. Lanes outside `active` hold NaN bits.
template <class T>
struct Lanes {
    T in[32], out[32];
    uint32_t argument[32];
    uint32_t active;
    int first, width;  // the group's lanes are first .. first + width - 1
    bool is_active(int lane) const { return active >> lane & 1; }
};

template <class T, class Operation, bool quad>
struct Collective {
    static void combine(metalsim::Thread** threads, uint32_t active) {
        Lanes<T> lanes;
        lanes.active = active;
        lanes.width = quad ? 4 : 32;
        lanes.first = quad ? __builtin_ctz(active) & ~3 : 0;
        memset((void*)lanes.in, 0xFF, sizeof lanes.in);
        for (uint32_t m = active; m; m &= m - 1) {
            int i = __builtin_ctz(m);
            memcpy((void*)&lanes.in[i], threads[i]->operand, sizeof(T));
            lanes.argument[i] = threads[i]->argument;
        }
        Operation{}(lanes);
        for (uint32_t m = active; m; m &= m - 1) {
            int i = __builtin_ctz(m);
            memcpy(threads[i]->result, (const void*)&lanes.out[i], sizeof(T));
        }
    }
    static T run(const T& value, uint32_t argument, metalsim::Site site) {
        T result;
        metalsim::Thread* t = metalsim::current_thread;
        t->operand = &value;
        t->result = &result;
        t->argument = argument;
        site.operation = (const void*)&combine;
        t->site = site;
        t->combine = &combine;
        if constexpr (quad)
            metalsim::quadgroup_collective(t);
        else
            metalsim::simdgroup_collective(t);
        return result;
    }
};

struct Sum {
    template <class T>
    static T apply(T a, T b) {
        return T(a + b);
    }
    template <class T>
    static T identity() {
        return T(0);
    }
};
struct Product {
    template <class T>
    static T apply(T a, T b) {
        return T(a * b);
    }
    template <class T>
    static T identity() {
        return T(1);
    }
};
struct Maximum {
    template <class T>
    static T apply(T a, T b) {
        return metal::max(a, b);
    }
};
struct Minimum {
    template <class T>
    static T apply(T a, T b) {
        return metal::min(a, b);
    }
};
struct And {
    template <class T>
    static T apply(T a, T b) {
        return T(a & b);
    }
};
struct Or {
    template <class T>
    static T apply(T a, T b) {
        return T(a | b);
    }
};
struct Xor {
    template <class T>
    static T apply(T a, T b) {
        return T(a ^ b);
    }
};

// The order of today's GPUs: partners at distance 1, 2, 4, 8, 16. All lanes get the same bits.
template <class Op>
struct Reduce {
    template <class T>
    void operator()(Lanes<T>& l) {
        uint32_t has = l.active;
        for (int d = 1; d < l.width; d *= 2)
            for (int i = l.first; i < l.first + l.width; i += 2 * d) {
                bool a = has >> i & 1, b = has >> (i + d) & 1;
                if (a && b)
                    l.in[i] = Op::apply(l.in[i], l.in[i + d]);
                else if (b)
                    l.in[i] = l.in[i + d], has |= 1u << i;
            }
        for (int i = 0; i < l.width; i++) l.out[l.first + i] = l.in[l.first];
    }
};

template <class Op, bool exclusive>
struct Scan {
    template <class T>
    void operator()(Lanes<T>& l) {
        T running = Op::template identity<T>();
        for (int i = l.first; i < l.first + l.width; i++) {
            if (!l.is_active(i)) continue;
            T next = Op::apply(running, l.in[i]);
            l.out[i] = exclusive ? running : next;
            running = next;
        }
    }
};

enum class Move { index, exclusive_or, up, down, rotate_up, rotate_down };

// Reading past the end with up/down leaves the lane its own value; Metal leaves it undefined.
template <Move move>
struct Shuffle {
    template <class T>
    void operator()(Lanes<T>& l) {
        for (int i = 0; i < l.width; i++) {
            int lane = l.first + i, a = int(l.argument[lane]), from = 0;
            if (!l.is_active(lane)) continue;
            if constexpr (move == Move::index) from = a;
            if constexpr (move == Move::exclusive_or) from = i ^ a;
            if constexpr (move == Move::up) from = i - a;
            if constexpr (move == Move::down) from = i + a;
            if constexpr (move == Move::rotate_up) from = (i - a) & (l.width - 1);
            if constexpr (move == Move::rotate_down) from = (i + a) & (l.width - 1);
            if (from < 0 || from >= l.width) {
                l.out[lane] = l.in[lane];
                if constexpr (move == Move::index || move == Move::exclusive_or)
                    metalsim::report_from_kernel("simd-shuffle-range",
                                                 "shuffle from a lane index out of range", nullptr);
            } else {
                if (!l.is_active(l.first + from))
                    metalsim::report_from_kernel("simd-inactive-lane", "shuffle reads an inactive lane",
                                                 nullptr);
                l.out[lane] = l.in[l.first + from];
            }
        }
    }
};

struct BroadcastFirst {
    template <class T>
    void operator()(Lanes<T>& l) {
        for (int i = 0; i < l.width; i++) l.out[l.first + i] = l.in[__builtin_ctz(l.active)];
    }
};

// Low half: lanes whose predicate holds; high half: active lanes. Bits are relative to the group.
struct Ballot {
    void operator()(Lanes<uint64_t>& l) {
        uint64_t mask = l.width == 32 ? 0xFFFFFFFFu : 0xFu, votes = 0;
        for (int i = 0; i < l.width; i++)
            if (l.is_active(l.first + i) && (l.in[l.first + i] & 1)) votes |= 1ull << i;
        for (int i = 0; i < l.width; i++)
            l.out[l.first + i] = votes | ((uint64_t(l.active) >> l.first) & mask) << 32;
    }
};

}  // namespace detail

#define METALSIM_COLLECTIVE(name, quad, ...)                                              \
    template <class T>                                                                    \
    T name(T value, METALSIM_SITE) {                                                      \
        return detail::Collective<T, __VA_ARGS__, quad>::run(value, 0, METALSIM_HERE(0)); \
    }
#define METALSIM_MOVE(name, quad, move)                                                              \
    template <class T>                                                                               \
    T name(T value, ushort by, METALSIM_SITE) {                                                      \
        return detail::Collective<T, detail::Shuffle<move>, quad>::run(value, by, METALSIM_HERE(0)); \
    }
#define METALSIM_GROUP(group, quad)                                                                   \
    METALSIM_COLLECTIVE(group##_sum, quad, detail::Reduce<detail::Sum>)                               \
    METALSIM_COLLECTIVE(group##_product, quad, detail::Reduce<detail::Product>)                       \
    METALSIM_COLLECTIVE(group##_max, quad, detail::Reduce<detail::Maximum>)                           \
    METALSIM_COLLECTIVE(group##_min, quad, detail::Reduce<detail::Minimum>)                           \
    METALSIM_COLLECTIVE(group##_and, quad, detail::Reduce<detail::And>)                               \
    METALSIM_COLLECTIVE(group##_or, quad, detail::Reduce<detail::Or>)                                 \
    METALSIM_COLLECTIVE(group##_xor, quad, detail::Reduce<detail::Xor>)                               \
    METALSIM_COLLECTIVE(group##_prefix_inclusive_sum, quad, detail::Scan<detail::Sum, false>)         \
    METALSIM_COLLECTIVE(group##_prefix_exclusive_sum, quad, detail::Scan<detail::Sum, true>)          \
    METALSIM_COLLECTIVE(group##_prefix_inclusive_product, quad, detail::Scan<detail::Product, false>) \
    METALSIM_COLLECTIVE(group##_prefix_exclusive_product, quad, detail::Scan<detail::Product, true>)  \
    METALSIM_COLLECTIVE(group##_broadcast_first, quad, detail::BroadcastFirst)                        \
    METALSIM_MOVE(group##_shuffle, quad, detail::Move::index)                                         \
    METALSIM_MOVE(group##_broadcast, quad, detail::Move::index)                                       \
    METALSIM_MOVE(group##_shuffle_xor, quad, detail::Move::exclusive_or)                              \
    METALSIM_MOVE(group##_shuffle_up, quad, detail::Move::up)                                         \
    METALSIM_MOVE(group##_shuffle_down, quad, detail::Move::down)                                     \
    METALSIM_MOVE(group##_shuffle_rotate_up, quad, detail::Move::rotate_up)                           \
    METALSIM_MOVE(group##_shuffle_rotate_down, quad, detail::Move::rotate_down)                       \
    struct group##_vote {                                                                             \
        using vote_t = uint64_t;                                                                      \
        uint64_t votes;                                                                               \
        uint32_t active;                                                                              \
        explicit group##_vote(uint64_t v = 0, uint32_t a = ~0u) : votes(v), active(a) {}              \
        explicit operator vote_t() const { return votes; }                                            \
        bool any() const { return votes != 0; }                                                       \
        bool all() const { return uint32_t(votes) == active; }                                        \
    };                                                                                                \
    inline group##_vote group##_ballot(bool p, METALSIM_SITE) {                                       \
        uint64_t b = detail::Collective<uint64_t, detail::Ballot, quad>::run(p, 0, METALSIM_HERE(0)); \
        return group##_vote(uint32_t(b), uint32_t(b >> 32));                                          \
    }                                                                                                 \
    inline bool group##_all(bool p, METALSIM_SITE) {                                                  \
        return group##_ballot(p, file_, line_, column_).all();                                        \
    }                                                                                                 \
    inline bool group##_any(bool p, METALSIM_SITE) {                                                  \
        return group##_ballot(p, file_, line_, column_).any();                                        \
    }                                                                                                 \
    inline group##_vote group##_active_threads_mask(METALSIM_SITE) {                                  \
        return group##_ballot(true, file_, line_, column_);                                           \
    }                                                                                                 \
    inline bool group##_is_first(METALSIM_SITE) {                                                     \
        uint32_t active = group##_ballot(true, file_, line_, column_).active;                         \
        return metalsim::current_thread->lane % (quad ? 4 : 32) == uint32_t(__builtin_ctz(active));   \
    }
METALSIM_GROUP(simd, false)
METALSIM_GROUP(quad, true)

template <class T>
T simd_shuffle_and_fill_up(T value, T fill, ushort delta, METALSIM_SITE) {
    T r =
        detail::Collective<T, detail::Shuffle<detail::Move::up>, false>::run(value, delta, METALSIM_HERE(0));
    return metalsim::current_thread->lane < delta ? fill : r;
}
template <class T>
T simd_shuffle_and_fill_down(T value, T fill, ushort delta, METALSIM_SITE) {
    T r = detail::Collective<T, detail::Shuffle<detail::Move::down>, false>::run(value, delta,
                                                                                 METALSIM_HERE(0));
    return metalsim::current_thread->lane + delta > 31 ? fill : r;
}
}  // namespace msl::metal
