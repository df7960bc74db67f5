#include "ordering.hpp"

#include <algorithm>
#include <unordered_map>

#include "shadow.hpp"

namespace metalsim {

void PassSet::merge(const PassSet& other) {
    up_to = std::max(up_to, other.up_to);
    more.insert(other.more.begin(), other.more.end());
    more.erase(more.begin(), more.upper_bound(up_to));
}

namespace ordering {

namespace {

struct Acquired {
    uint32_t epoch, thread;          // of the release
    uint32_t own_epoch, own_thread;  // of the acquire
};

struct State {
    uint64_t passes = 0, serial = 0, stages = 0;
    uint64_t generation_base = 0;  // passes up to here belong to settled generations
    bool concurrent = true, stage_open = false;
    PassSet after;
    uint32_t dispatch = 0;
    uint32_t barrier_dispatch = 0;  // dispatches of the current pass up to here are ordered
    std::vector<uint64_t> pass_of = std::vector<uint64_t>(last_dispatch + 1);
    std::unordered_map<uintptr_t, std::set<Release>> released;  // in the current dispatch
    std::map<uint64_t, Acquired> acquired;                      // by the current threadgroup
};
State& state() {
    static State* instance = new State;
    return *instance;
}

}  // namespace

uint64_t begin_pass(bool concurrent, const PassSet& after) {
    State& s = state();
    s.passes++;
    s.concurrent = concurrent;
    s.after = after;
    s.after.up_to = std::max(s.after.up_to, s.generation_base);
    s.barrier_dispatch = 0;
    s.stage_open = false;
    return s.passes;
}

void extend_pass(const PassSet& after) { state().after.merge(after); }

uint32_t begin_dispatch() {
    State& s = state();
    if (s.dispatch == last_dispatch) {
        shadow::settle_all();
        s.dispatch = 0;
        s.barrier_dispatch = 0;
        s.generation_base = s.passes;
        for (Buffer* b : arena::live_buffers()) b->barrier_dispatch = 0;
    }
    if (!s.concurrent) barrier();
    s.dispatch++;
    s.serial++;
    s.pass_of[s.dispatch] = s.passes;
    s.released.clear();
    if (!s.stage_open) {
        s.stage_open = true;
        s.stages++;
    }
    return s.dispatch;
}

uint32_t current_dispatch() { return state().dispatch; }
uint64_t dispatch_serial() { return state().serial; }
uint64_t stage() { return state().stages; }

void barrier() {
    state().barrier_dispatch = state().dispatch;
    state().stage_open = false;
}

void barrier(Buffer& buffer) {
    buffer.barrier_pass = state().passes;
    buffer.barrier_dispatch = state().dispatch;
    state().stage_open = false;
}

bool ordered_before(uint32_t dispatch, const Buffer* buffer) {
    const State& s = state();
    if (dispatch == 0) return true;  // settled
    uint64_t pass = s.pass_of[dispatch];
    if (pass == s.passes)
        return dispatch <= s.barrier_dispatch ||
               (buffer && buffer->barrier_pass == pass && dispatch <= buffer->barrier_dispatch);
    return !buffer || buffer->tracked || s.after.contains(pass);
}

void release_at(uintptr_t counter, const Release& own) {
    State& s = state();
    std::set<Release>& list = s.released[counter];
    list.erase(own);
    list.insert(own);
    for (const auto& [group, a] : s.acquired) list.insert({group, a.epoch, a.thread});
}

void acquire_at(uintptr_t counter, const Release& own) {
    State& s = state();
    for (const Release& r : s.released[counter])
        if (r.group != own.group)
            s.acquired.try_emplace(r.group, Acquired{r.epoch, r.thread, own.epoch, own.thread});
}

void begin_threadgroup() { state().acquired.clear(); }

bool group_ordered(uint64_t group, uint32_t epoch, uint32_t thread, uint32_t own_epoch, uint32_t own_thread) {
    const State& s = state();
    auto it = s.acquired.find(group);
    if (it == s.acquired.end()) return false;
    const Acquired& a = it->second;
    bool released = epoch != a.epoch || thread == a.thread;
    bool acquired = own_epoch != a.own_epoch || own_thread == a.own_thread;
    return released && acquired;
}

}  // namespace ordering
}  // namespace metalsim
