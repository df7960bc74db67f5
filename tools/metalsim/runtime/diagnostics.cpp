#include "diagnostics.hpp"

#include <map>
#include <mutex>

#include "kernel_abi.hpp"
#include "line_table.hpp"

namespace metalsim {

namespace {
struct Log {
    std::mutex mutex;
    std::vector<Diagnostic> list;
    std::map<std::string, size_t> index;
    std::string kernel, last;
    uint64_t total = 0;
};
Log& log() {
    static Log* instance = new Log;
    return *instance;
}

std::string thread_name() {
    const Thread* t = current_thread;
    if (!t) return "";
    const Uint3& g = t->threadgroup_position;
    return " [thread " + std::to_string(t->index) + " of threadgroup (" + std::to_string(g.x) + ", " +
           std::to_string(g.y) + ", " + std::to_string(g.z) + ")]";
}
}  // namespace

void report(const char* kind, const std::string& message, Place place) {
    Log& l = log();
    std::lock_guard lock(l.mutex);
    l.total++;
    std::string where = place.source.empty() ? source_line(place.pc) : place.source;
    // Without a place, messages that differ only in their numbers behind the first words are one report.
    std::string key =
        std::string(kind) + "|" + l.kernel + "|" + (where.empty() ? message.substr(0, 60) : where);
    auto [it, fresh] = l.index.try_emplace(key, l.list.size());
    if (!fresh) {
        l.list[it->second].count++;
        return;
    }
    l.list.push_back({kind, l.kernel, message + thread_name(), where});
    l.last = std::string(kind) + ": " + l.list.back().message + (where.empty() ? "" : " at " + where);
}

void set_report_context(const char* kernel) {
    std::lock_guard lock(log().mutex);
    log().kernel = kernel;
}

size_t diagnostic_count() {
    std::lock_guard lock(log().mutex);
    return log().list.size();
}

uint64_t report_total() {
    std::lock_guard lock(log().mutex);
    return log().total;
}

std::string last_report() {
    std::lock_guard lock(log().mutex);
    return log().last;
}

std::vector<Diagnostic> diagnostics() {
    std::lock_guard lock(log().mutex);
    return log().list;
}

void clear_diagnostics() {
    std::lock_guard lock(log().mutex);
    log().list.clear();
    log().index.clear();
    log().last.clear();
}

}  // namespace metalsim
