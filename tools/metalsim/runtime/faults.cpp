#include "faults.hpp"

#include <cstdlib>
#include <map>
#include <mutex>
#include <sstream>
#include <vector>

namespace metalsim::faults {

namespace {

struct Armed {
    uint32_t skip, left;
    int code;
};

const char* const kinds[] = {"buffer", "library", "function",  "pipeline",       "queue",
                             "event",  "fence",   "residency", "command_buffer", "timeout"};

bool is_known(const std::string& kind) {
    for (const char* k : kinds)
        if (kind == k) return true;
    return false;
}

struct State {
    std::mutex mutex;
    std::map<std::string, Armed> armed;
    State() {
        const char* text = getenv("METALSIM_FAULT");
        std::stringstream list(text ? text : "");
        for (std::string item; std::getline(list, item, ',');) {
            std::stringstream fields(item);
            std::vector<std::string> f;
            for (std::string field; std::getline(fields, field, ':');) f.push_back(field);
            if (f.size() < 2 || !is_known(f[0])) continue;
            auto number = [&](size_t i, int otherwise) {
                return f.size() > i ? atoi(f[i].c_str()) : otherwise;
            };
            armed[f[0]] = {uint32_t(number(1, 1)) - 1, uint32_t(number(3, 1)), number(2, 1)};
        }
    }
};
State& state() {
    static State* instance = new State;
    return *instance;
}

}  // namespace

bool arm(const std::string& kind, uint32_t nth, int code, uint32_t repeat) {
    if (!is_known(kind) || nth == 0) return false;
    std::lock_guard lock(state().mutex);
    state().armed[kind] = {nth - 1, repeat ? repeat : 1, code};
    return true;
}

void clear() {
    std::lock_guard lock(state().mutex);
    state().armed.clear();
}

Fault strike(const char* kind) {
    std::lock_guard lock(state().mutex);
    auto it = state().armed.find(kind);
    if (it == state().armed.end()) return {};
    Armed& a = it->second;
    if (a.skip) {
        a.skip--;
        return {};
    }
    Fault fault{true, a.code};
    if (--a.left == 0) state().armed.erase(it);
    return fault;
}

}  // namespace metalsim::faults
