// What every piece of code that talks to Metal needs: a pool for what it returns, strings, reasons.
#pragma once

#include <Foundation/Foundation.hpp>
#include <string>

#include "backend/metal/owned.h"

namespace lily::metal {

// Frees what Metal returned meanwhile. Python's threads have no pool of their own.
class AutoreleaseScope {
  public:
    AutoreleaseScope() : pool_(NS::TransferPtr(NS::AutoreleasePool::alloc()->init())) {}
    AutoreleaseScope(const AutoreleaseScope&) = delete;
    AutoreleaseScope& operator=(const AutoreleaseScope&) = delete;

  private:
    Owned<NS::AutoreleasePool> pool_;
};

inline NS::String* to_ns(const std::string& text) {
    return NS::String::string(text.c_str(), NS::UTF8StringEncoding);
}

inline std::string to_std(const NS::String* text) {
    const char* utf8 = text ? text->utf8String() : nullptr;
    return utf8 ? utf8 : "";
}

inline std::string reason_of(const NS::Error* error) {
    const std::string reason = error ? to_std(error->localizedDescription()) : "";
    return reason.empty() ? "the system gave no reason" : reason;
}

}  // namespace lily::metal
