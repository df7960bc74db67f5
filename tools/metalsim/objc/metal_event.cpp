// MTLEvent, MTLSharedEvent, MTLFence and MTLResidencySet.
#include <chrono>

#include "faults.hpp"
#include "metal.hpp"

namespace metalsim::objc {

void Event::signal(uint64_t v, const PassSet& passes) {
    std::vector<Notification> due;
    {
        std::lock_guard lock(mutex);
        value = std::max(value, v);
        signals.push_back({v, passes});
        for (size_t i = 0; i < notifications.size();) {
            if (notifications[i].value > value) {
                i++;
                continue;
            }
            due.push_back(notifications[i]);
            notifications.erase(notifications.begin() + long(i));
        }
    }
    changed.notify_all();
    for (Notification& n : due) n.call();
}

bool Event::wait(uint64_t v, double seconds, PassSet& passes) {
    std::unique_lock lock(mutex);
    auto reached = [&] { return value >= v; };
    if (!changed.wait_for(lock, std::chrono::duration<double>(seconds), reached)) return false;
    for (const Signal& s : signals) {
        passes.merge(s.passes);
        if (s.value >= v) break;
    }
    return true;
}

namespace {

template <class T>
T* unless_fault(const char* kind, const char* cls) {
    return faults::strike(kind) ? nullptr : make<T>(cls);
}

void declare_shared_events() {
    const char* S = "MTLSharedEvent";
    declare_class<Event>(S);
    method(S, "signaledValue", [](Event* e, SEL) {
        PassSet passes;
        uint64_t value;
        {
            std::lock_guard lock(e->mutex);
            value = e->value;
        }
        e->wait(value, 0, passes);
        host_learns(passes);
        return value;
    });
    method(S, "setSignaledValue:", [](Event* e, SEL, uint64_t v) { e->signal(v, known_to_host()); });
    method(S, "waitUntilSignaledValue:timeoutMS:", [](Event* e, SEL, uint64_t v, uint64_t milliseconds) {
        PassSet passes;
        bool reached = e->wait(v, double(milliseconds) / 1000, passes);
        if (reached) host_learns(passes);
        return reached;
    });
    method(S, "notifyListener:atValue:block:", [](Event* e, SEL, Object*, uint64_t v, const void* block) {
        Closure<Event*, uint64_t> closure(block);
        bool due;
        {
            std::lock_guard lock(e->mutex);
            due = e->value >= v;
            if (!due) e->notifications.push_back({v, [=] { closure(e, v); }});
        }
        if (due) closure(e, v);
    });
    declare_class<Object>("MTLSharedEventListener");
}

void declare_residency() {
    const char* R = "MTLResidencySet";
    declare_class<ResidencySet>(R);
    method(R, "addAllocation:", [](ResidencySet* r, SEL, Object* o) {
        if (r->allocations.insert(o).second) retain(o);
    });
    method(R, "addAllocations:count:", [](ResidencySet* r, SEL, Object* const* list, unsigned long n) {
        for (unsigned long i = 0; i < n; i++)
            if (r->allocations.insert(list[i]).second) retain(list[i]);
    });
    method(R, "removeAllocation:", [](ResidencySet* r, SEL, Object* o) {
        if (r->allocations.erase(o)) release(o);
    });
    method(R, "removeAllAllocations", [](ResidencySet* r, SEL) {
        for (Object* o : r->allocations) release(o);
        r->allocations.clear();
    });
    method(R, "commit", [](ResidencySet* r, SEL) { r->committed = r->allocations; });
    method(R, "containsAllocation:", [](ResidencySet* r, SEL, Object* o) {
        return r->allocations.count(o) != 0;
    });
    method(R, "allocationCount",
           [](ResidencySet* r, SEL) { return static_cast<unsigned long>(r->allocations.size()); });
    method(R, "allocatedSize", [](ResidencySet* r, SEL) {
        uint64_t total = 0;
        for (Object* o : r->committed)
            if (o->isa->name == "MTLBuffer") total += static_cast<MetalBuffer*>(o)->buffer->length;
        return total;
    });
    method(R, "requestResidency", [](ResidencySet*, SEL) {});
    method(R, "endResidency", [](ResidencySet*, SEL) {});

    const char* D = "MTLResidencySetDescriptor";
    declare_class<Object>(D);
    method(D, "setInitialCapacity:", [](Object*, SEL, unsigned long) {});
    method(D, "setLabel:", [](Object* d, SEL, Object* label) { d->label = text_of(label); });
}

}  // namespace

void declare_events() {
    const char* D = "MTLDevice";
    method(D, "newEvent", [](Device*, SEL) { return unless_fault<Event>("event", "MTLEvent"); });
    method(D, "newSharedEvent", [](Device*, SEL) { return unless_fault<Event>("event", "MTLSharedEvent"); });
    method(D, "newFence", [](Device*, SEL) { return unless_fault<Fence>("fence", "MTLFence"); });
    method(D, "newResidencySetWithDescriptor:error:", [](Device*, SEL, Object* d, Error** e) {
        auto* r = unless_fault<ResidencySet>("residency", "MTLResidencySet");
        if (r && d) r->label = d->label;
        if (!r) give_error(e, "MTLResidencySetErrorDomain", 1, "injected fault: no residency set");
        return r;
    });
    declare_class<Event>("MTLEvent");
    declare_class<Fence>("MTLFence");
    declare_shared_events();
    declare_residency();
    for (const char* cls : {"MTLEvent", "MTLSharedEvent", "MTLFence", "MTLResidencySet"}) {
        method(cls, "label", [](Object* o, SEL) { return autoreleased(new_string(o->label)); });
        method(cls, "setLabel:", [](Object* o, SEL, Object* label) { o->label = text_of(label); });
        method(cls, "device", [](Object*, SEL) { return system_device(); });
    }
}

}  // namespace metalsim::objc
